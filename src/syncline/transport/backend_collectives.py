"""torch.distributed's collectives, built from a transport's operations.

Those that move data as it is, and messages; reductions are in `backend_reductions`. Where tensors of unequal sizes
meet, they travel as messages or broadcasts, one for each pair of ranks or each rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import AllgatherOptions, all_gather_flat
from syncline.transport.backend_base import back, copies_back, flat, to_fill, waiting
from syncline.transport.backend_reductions import Reductions
from syncline.transport.backend_work import ENDED, Several

__all__ = ["Collectives"]


class Collectives(Reductions):
    """All collectives by the names that torch calls a process group by."""

    # ------------------------------------------------------------------ data

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if isinstance(opts, int):
            root, opts = opts, dist.BroadcastOptions()
            opts.rootRank = root
        elif opts is None:
            opts = dist.BroadcastOptions()
        if len(tensors) != 1:
            return self._together(
                opts, [self.broadcast([tensor], waiting(opts)) for tensor in tensors], tensors
            )
        tensor = tensors[0]
        if not tensor.is_cpu:
            return cast(dist.Work, self.elsewhere(tensor.device).broadcast(tensors, opts))
        wire = flat(tensor)
        work = self._transport.broadcast(wire, opts.rootRank)
        return self._ended_or_under_way(opts, work, tensors, None if wire is tensor else back(tensor, wire))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not output.is_cpu:
            opts = opts or AllgatherOptions()
            return all_gather_flat(self.elsewhere(output.device), output, input, opts)
        whole, finish = to_fill(output)
        work = self._transport.all_gather(whole, flat(input))
        return self._ended_or_under_way(opts, work, [output, input], finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        parts, input = (outputs, inputs) if isinstance(inputs, Tensor) else (outputs[0], inputs[0])
        if not input.is_cpu:
            opts = opts or AllgatherOptions()
            return cast(dist.Work, self.elsewhere(input.device).allgather([parts], [input], opts))
        self._check_parts("all_gather", parts)
        mine = flat(input)
        if any(part.numel() != mine.numel() for part in parts):
            return self._all_gather_unequal(parts, mine, opts)
        whole = torch.empty(mine.numel() * len(parts), dtype=mine.dtype)
        work = self._transport.all_gather(whole, mine)
        finish = copies_back(list(zip(parts, whole.chunk(len(parts)) if whole.numel() else [], strict=False)))
        return self._ended_or_under_way(opts, work, [*parts, mine], finish)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or AllgatherOptions()
        works = [
            self.allgather([[row[i] for row in outputs]], [input], waiting(opts))
            for i, input in enumerate(inputs)
        ]
        return self._together(opts, works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._each(self.all_gather_single, outputs, inputs, opts, AllgatherOptions)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        (input,) = inputs
        if not input.is_cpu:
            return cast(dist.Work, self.elsewhere(input.device).gather(outputs, inputs, opts))
        if self._transport.rank != opts.rootRank:
            return self._messages(opts, [(flat(input), opts.rootRank)], [])
        (parts,) = outputs
        self._check_parts("gather", parts)
        parts[opts.rootRank].copy_(input)
        return self._messages(opts, [], [(part, rank) for rank, part in enumerate(parts)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        (output,) = outputs
        if not output.is_cpu:
            return cast(dist.Work, self.elsewhere(output.device).scatter(outputs, inputs, opts))
        if self._transport.rank != opts.rootRank:
            return self._messages(opts, [], [(output, opts.rootRank)])
        (parts,) = inputs
        self._check_parts("scatter", parts)
        output.copy_(parts[opts.rootRank])
        return self._messages(opts, [(flat(part), rank) for rank, part in enumerate(parts)], [])

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        if not inputs[0].is_cpu:
            opts = opts or dist.AllToAllOptions()
            return cast(dist.Work, self.elsewhere(inputs[0].device).alltoall(outputs, inputs, opts))
        self._check_parts("all_to_all", outputs)
        self._check_parts("all_to_all", inputs)
        rank = self._transport.rank
        outputs[rank].copy_(inputs[rank])
        sends = [(flat(tensor), peer) for peer, tensor in enumerate(inputs)]
        return self._messages(opts, sends, [(tensor, peer) for peer, tensor in enumerate(outputs)])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        if not input.is_cpu:
            opts = opts or dist.AllToAllOptions()
            other = self.elsewhere(input.device)
            return cast(
                dist.Work,
                other.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts),
            )
        outputs, inputs = self._rows(output, output_split_sizes), self._rows(input, input_split_sizes)
        return self.alltoall(outputs, inputs, opts)

    # ------------------------------------------------------------------ messages, barriers

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if not tensor.is_cpu:
            return cast(dist.Work, self.elsewhere(tensor.device).send(tensors, dst, tag))
        _check_tag(tag)
        wire = flat(tensor)
        return self._under_way(self._transport.send(wire, dst), [wire])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if not tensor.is_cpu:
            return cast(dist.Work, self.elsewhere(tensor.device).recv(tensors, src, tag))
        _check_tag(tag)
        target, finish = to_fill(tensor)
        return self._under_way(self._transport.recv(target, src), tensors, finish, src)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        if not tensors[0].is_cpu:
            return cast(dist.Work, self.elsewhere(tensors[0].device).recv_anysource(tensors, tag))
        raise ValueError(
            "the syncline backend receives from a rank that is named, not from any: pass src= to "
            "torch.distributed.recv"
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        work = self._transport.barrier()
        if opts is None or opts.asyncOp:
            return self._under_way(work, [])
        work.wait()
        return ENDED

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose time-out names the ranks that are missing, as every operation's does."""
        self._transport.barrier().wait(timeout.total_seconds() if timeout else None)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return self._together(None, works, [])

    # ------------------------------------------------------------------ other names of the same

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def _all_gather_unequal(self, parts: list[Tensor], mine: Tensor, opts: Any) -> dist.Work:
        rank, works, copies = self._transport.rank, [], []
        for src, part in enumerate(parts):
            wire = mine if src == rank else torch.empty_like(part, memory_format=torch.contiguous_format)
            works.append(self._transport.broadcast(wire, src))
            copies.append((part, wire))
        return self._ended_or_under_way(opts, Several(works), [*parts, mine], copies_back(copies))

    def _rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """`tensor` cut along its first dimension, one part for each rank."""
        size, numel = self._transport.size, tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if numel % size:
                raise ValueError(f"expected a first dimension that {size} ranks can share, got {numel}")
            sizes = [numel // size] * size
        if len(sizes) != size or sum(sizes) != numel:
            raise ValueError(f"expected {size} split sizes that add up to {numel}, got {sizes}")
        return list(tensor.detach().split(sizes))


def _check_tag(tag: int) -> None:
    if tag:
        raise ValueError(
            f"the syncline backend has no tags, got tag={tag}: messages between two ranks keep their order, so call "
            "send and recv in the same order on both"
        )
