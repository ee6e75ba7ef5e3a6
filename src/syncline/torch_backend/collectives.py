"""The collectives of torch.distributed, built from a transport's operations.

The class `Reductions` implements the reductions. The class `Collectives` adds the operations that move data unchanged,
and messages between two ranks. If the ranks' tensors differ in size, they are sent by broadcasts (one per rank) or
messages (one per pair of ranks).

A transport operates on one dense, contiguous tensor at a time. Tensors in any other form are first copied to such a
tensor. When the caller waits for the work, the result is copied back.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import AllgatherOptions, all_gather_flat, reduce_scatter_flat
from syncline._torch.tensors import sparse_tensor
from syncline.torch_backend.arguments import (
    check_none,
    check_pairs,
    check_tag,
    is_in_memory,
    only,
    split_sizes,
)
from syncline.torch_backend.base import Group, asynchronous, copy_back, fillable, flat, with_option
from syncline.torch_backend.work import ENDED
from syncline.transport.base import ReduceOp
from syncline.transport.work import CombinedWork, Work

_SUM = dist.ReduceOp.SUM

_NAMES: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}

_BITWISE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class Reductions(Group):
    """A process group that implements torch's reductions, under torch's method names.

    The transport reduces CPU tensors. For tensors on another device, the methods use the group of `group_for`.
    """

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if type(tensors) is list and len(tensors) == 1 and opts is not None:  # the hot path
            tensor, op = tensors[0], opts.reduceOp
            name = "sum" if op == _SUM else _NAMES.get(op.op)
            if name is not None and tensor.is_cpu and is_in_memory(tensor) and tensor.is_contiguous():
                work = self.transport.all_reduce(tensor, name)
                if opts.asyncOp:
                    return self._under_way(work, tensors)
                work.wait()
                return ENDED
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        opts = with_option(dist.AllreduceOptions, opts, "reduceOp")
        tensor = only("all_reduce", tensors)
        if other := self._other_group(tensor):
            return other.allreduce(tensors, opts)
        self._check("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        work, finish = self._start_all_reduce(tensor, opts.reduceOp)
        return self._ended_or_under_way(opts, work, tensors, finish)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = with_option(dist.AllreduceCoalescedOptions, opts, "reduceOp")
        if other := self._other_group(*tensors):
            return other.allreduce_coalesced(tensors, opts)
        self._check("all_reduce_coalesced", tensors)
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor)
        op, works = _reduction(opts.reduceOp), []
        copies: list[tuple[Tensor, Tensor]] = []
        for alike in by_dtype.values():
            packed = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            works.append(self.transport.all_reduce(packed, op))
            copies += zip(alike, packed.split([tensor.numel() for tensor in alike]), strict=True)
        return self._ended_or_under_way(opts, CombinedWork.of(works), tensors, copy_back(*copies))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensor = only("reduce", tensors)
        if other := self._other_group(tensor):
            return other.reduce(tensors, opts)
        self._check("reduce", tensors, opts=opts)
        is_root = self.transport.rank == opts.rootRank
        # Ranks other than the root keep their input.
        reduced = tensor if is_root else tensor.detach().clone(memory_format=torch.contiguous_format)
        work, finish = self._start_all_reduce(reduced, opts.reduceOp, terms=1 + opts.rootRank)
        return self._ended_or_under_way(opts, work, [tensor, reduced], finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = with_option(dist.ReduceScatterOptions, opts, "reduceOp")
        if other := self._other_group(output):
            return reduce_scatter_flat(other, output, input, opts)
        self._check("reduce_scatter_tensor", [output, input])
        part, finish = fillable(output)
        work = self.transport.reduce_scatter(part, flat(input), _reduction(opts.reduceOp))
        return self._ended_or_under_way(opts, work, [output, input], finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        is_plain = isinstance(outputs, Tensor)
        output = outputs if is_plain else only("reduce_scatter", outputs)
        parts = inputs if is_plain else only("reduce_scatter", inputs)
        opts = with_option(dist.ReduceScatterOptions, opts, "reduceOp")
        if other := self._other_group(output):
            return other.reduce_scatter([output], [parts], opts)
        self._check("reduce_scatter", [output], parts)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        op = _reduction(opts.reduceOp)
        if len({part.numel() for part in parts}) == 1:
            target, finish = fillable(output)
            work = self.transport.reduce_scatter(target, whole, op)
            return self._ended_or_under_way(opts, work, [output, whole], finish)
        work = self.transport.all_reduce(whole, op)
        mine = whole.split([part.numel() for part in parts])[self.transport.rank]
        return self._ended_or_under_way(opts, work, [output, whole], copy_back((output, mine)))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        operation, name = self.reduce_scatter_single, "reduce_scatter_tensor"
        return self._each(name, operation, outputs, inputs, opts, dist.ReduceScatterOptions)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_all_reduce(
        self, tensor: Tensor, op: Any, terms: int = 0
    ) -> tuple[Work, Callable[[], object] | None]:
        """Start an all_reduce of `tensor`. For `terms`, see `Transport.all_reduce`.

        Returns:
            The work, and a function that writes the result to `tensor`. Call the function when the work is done. The
            function is None if the work itself writes to `tensor`.
        """
        combine = _BITWISE.get(op.op)
        if combine is None:
            wire = flat(tensor)
            return self.transport.all_reduce(wire, _reduction(op), terms=terms), copy_back((tensor, wire))
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(
                f"{op.op.name} combines bits: expected a tensor of integers or booleans, got {tensor.dtype}"
            )
        rows = torch.empty(self.transport.size, tensor.numel(), dtype=tensor.dtype, device="cpu")
        work = self.transport.all_gather(rows, flat(tensor), terms=terms)

        def finish() -> None:
            tensor.detach().copy_(functools.reduce(cast(Any, combine), rows.unbind()).view(tensor.shape))

        return work, finish

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> dist.Work:
        """Start an all_reduce of a sparse tensor: broadcast the entries of every rank, and add them in rank order.

        This method blocks until every rank knows how many entries each rank has.
        """
        if _reduction(opts.reduceOp) not in ("sum", "mean"):
            raise ValueError(
                f"expected SUM or AVG for the all_reduce of a sparse tensor, got {opts.reduceOp.op.name}"
            )
        transport, mine = self.transport, tensor.detach().coalesce()
        sizes = torch.zeros(transport.size, 2 + mine.dim(), dtype=torch.int64, device="cpu")
        own_sizes = torch.tensor([mine.indices().shape[1], mine.sparse_dim(), *mine.shape], device="cpu")
        transport.all_gather(sizes, own_sizes).wait()
        if bool((sizes[:, 1:] != own_sizes[1:]).any()):
            shapes = ", ".join(
                f"{tuple(shape)} on rank {rank}" for rank, shape in enumerate(sizes[:, 2:].tolist())
            )
            raise ValueError(
                "expected a sparse tensor of one shape, with equally many sparse dimensions, on all ranks; got "
                f"{shapes}"
            )
        works, indices, values = [], [], []
        for src, count in enumerate(sizes[:, 0].tolist()):
            is_mine = src == transport.rank
            where = torch.empty(mine.sparse_dim(), count, dtype=torch.int64, device="cpu")
            what = torch.empty(count, *mine.shape[mine.sparse_dim() :], dtype=mine.dtype, device="cpu")
            indices.append(mine.indices().contiguous() if is_mine else where)
            values.append(mine.values().contiguous() if is_mine else what)
            works += [transport.broadcast(indices[-1], src), transport.broadcast(values[-1], src)]

        def finish() -> None:
            total = sparse_tensor(torch.cat(indices, 1), torch.cat(values), mine.shape).coalesce()
            with torch.no_grad():  # `detach` of a sparse tensor returns another tensor
                tensor.copy_(total if opts.reduceOp == _SUM else total / transport.size)

        return self._ended_or_under_way(opts, CombinedWork.of(works), [tensor], finish)


def _reduction(op: Any) -> ReduceOp:
    """Return the transport's name for one of torch's reduce operations.

    Raises:
        ValueError: transports do not have this operation.
    """
    op = getattr(op, "op", op)
    name = _NAMES.get(op)
    if name is None:
        hint = ": multiply the tensor yourself, and use SUM" if op == dist.ReduceOp.PREMUL_SUM else ""
        raise ValueError(
            f"expected SUM, AVG, MAX, MIN or PRODUCT, the operations by which the syncline backend can reduce this "
            f"tensor, got {op}{hint}"
        )
    return name


class Collectives(Reductions):
    """A process group that implements all of torch's collectives, under torch's method names."""

    # ------------------------------------------------------------------ data

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        opts = with_option(dist.BroadcastOptions, opts, "rootRank")
        tensor = only("broadcast", tensors)
        if other := self._other_group(tensor):
            return other.broadcast(tensors, opts)
        self._check("broadcast", tensors, opts=opts)
        wire = flat(tensor)
        work = self.transport.broadcast(wire, opts.rootRank)
        return self._ended_or_under_way(opts, work, tensors, copy_back((tensor, wire)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if other := self._other_group(output):
            return all_gather_flat(other, output, input, opts or AllgatherOptions())
        self._check("all_gather_into_tensor", [output, input])
        whole, finish = fillable(output)
        work = self.transport.all_gather(whole, flat(input))
        return self._ended_or_under_way(opts, work, [output, input], finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        is_plain = isinstance(inputs, Tensor)
        parts = outputs if is_plain else only("all_gather", outputs)
        input = inputs if is_plain else only("all_gather", inputs)
        if other := self._other_group(input):
            return other.allgather([parts], [input], opts or AllgatherOptions())
        self._check("all_gather", [input], parts)
        mine = flat(input)
        if any(part.numel() != mine.numel() for part in parts):
            return self._all_gather_unequal(parts, mine, opts)
        whole = torch.empty(mine.numel() * len(parts), dtype=mine.dtype, device="cpu")
        work = self.transport.all_gather(whole, mine)
        finish = copy_back(*zip(parts, whole.chunk(len(parts)) if whole.numel() else [], strict=False))
        return self._ended_or_under_way(opts, work, [*parts, mine], finish)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or AllgatherOptions()
        for row in outputs or [[]]:
            check_pairs("all_gather_coalesced", row, inputs)
        lists = [[row[i] for row in outputs] for i in range(len(inputs))]
        for parts, input in zip(lists, inputs, strict=True):
            if self._other_group(input) is None:
                self._check("all_gather", [input], parts)
        works = [
            self.allgather([parts], [input], asynchronous(opts))
            for parts, input in zip(lists, inputs, strict=True)
        ]
        return self._combined(opts, works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        operation, name = self.all_gather_single, "all_gather_into_tensor"
        return self._each(name, operation, outputs, inputs, opts, AllgatherOptions)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        exchange, input = next(self._exchanges), only("gather", inputs)
        if other := self._other_group(input):
            return other.gather(outputs, inputs, opts)
        if self.transport.rank != opts.rootRank:
            self._check("gather", inputs, opts=opts)
            check_none("gather", outputs, opts.rootRank)
            return self._messages(exchange, opts, [(flat(input), opts.rootRank)], [])
        parts = only("gather", outputs)
        self._check("gather", inputs, parts, opts=opts)
        parts[opts.rootRank].copy_(input)
        return self._messages(exchange, opts, [], [(part, rank) for rank, part in enumerate(parts)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        exchange, output = next(self._exchanges), only("scatter", outputs)
        if other := self._other_group(output):
            return other.scatter(outputs, inputs, opts)
        if self.transport.rank != opts.rootRank:
            self._check("scatter", outputs, opts=opts)
            check_none("scatter", inputs, opts.rootRank)
            return self._messages(exchange, opts, [], [(output, opts.rootRank)])
        parts = only("scatter", inputs)
        self._check("scatter", outputs, parts, opts=opts)
        output.copy_(parts[opts.rootRank])
        return self._messages(exchange, opts, [(flat(part), rank) for rank, part in enumerate(parts)], [])

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        exchange = next(self._exchanges)
        if other := self._other_group(*inputs):
            return other.alltoall(outputs, inputs, opts or dist.AllToAllOptions())
        return self._all_to_all(exchange, outputs, inputs, opts)

    def _all_to_all(self, exchange: int, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        self._check("all_to_all", [], outputs, inputs)
        rank = self.transport.rank
        outputs[rank].copy_(inputs[rank])
        sends = [(flat(tensor), peer) for peer, tensor in enumerate(inputs)]
        return self._messages(exchange, opts, sends, [(tensor, peer) for peer, tensor in enumerate(outputs)])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        name, exchange = "all_to_all_single", next(self._exchanges)
        if other := self._other_group(input):
            opts = opts or dist.AllToAllOptions()
            return other.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        self._check(name, [output, input])
        rank, size = self.transport.rank, self.transport.size
        outputs = list(output.detach().split(split_sizes(name, output, output_split_sizes, size)))
        inputs = list(input.detach().split(split_sizes(name, input, input_split_sizes, size)))
        if (
            outputs[rank].numel() == inputs[rank].numel()
        ):  # the two tensors may have rows of different lengths
            inputs[rank] = inputs[rank].reshape(outputs[rank].shape)
        return self._all_to_all(exchange, outputs, inputs, opts)

    # ------------------------------------------------------------------ messages, barriers

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensor = only("send", tensors)
        if other := self._other_group(tensor):
            return other.send(tensors, dst, tag)
        self._check("send", tensors)
        check_tag("send", tag)
        wire = flat(tensor)
        return self._under_way(self.transport.send(wire, dst), [wire])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        tensor = only("recv", tensors)
        if other := self._other_group(tensor):
            return other.recv(tensors, src, tag)
        self._check("recv", tensors)
        check_tag("recv", tag)
        target, finish = fillable(tensor)
        return self._under_way(self.transport.recv(target, src), tensors, finish, src)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        if other := self._other_group(*tensors):
            return other.recv_anysource(tensors, tag)
        raise ValueError(
            "the syncline backend cannot receive a tensor from an unknown rank: pass the sender as src= to "
            "torch.distributed.recv"
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        work = self.transport.barrier()
        if opts is None or opts.asyncOp:
            return self._under_way(work, [])
        work.wait()
        return ENDED

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this method. After a timeout, raise an error that names the missing ranks.

        With this backend, the errors of other operations name the missing ranks, too.
        """
        self.transport.barrier().wait(timeout.total_seconds() if timeout else None)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return self._combined(None, works, [])

    # ------------------------------------------------------------------ aliases and helpers

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def _all_gather_unequal(self, parts: list[Tensor], mine: Tensor, opts: Any) -> dist.Work:
        rank, works, copies = self.transport.rank, [], []
        for src, part in enumerate(parts):
            wire = mine if src == rank else torch.empty_like(part, memory_format=torch.contiguous_format)
            works.append(self.transport.broadcast(wire, src))
            copies.append((part, wire))
        return self._ended_or_under_way(opts, CombinedWork.of(works), [*parts, mine], copy_back(*copies))
