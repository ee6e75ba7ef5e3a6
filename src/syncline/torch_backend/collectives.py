"""The state and the collectives of a process group of this backend, built from a transport's operations.

If the ranks' tensors differ in size, they are sent by broadcasts (one per rank) or messages (one per pair of ranks). If
the options of a call have `asyncOp=False`, the call waits for its operation and returns the shared object `ENDED`.

A transport operates on one dense, contiguous tensor at a time. Tensors in any other form are first copied to such a
tensor. When the caller waits for the work, the result is copied back.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from syncline._torch.process_groups import (
    AllgatherOptions,
    C10dBackend,
    all_gather_flat,
    reduce_scatter_flat,
    set_timeout_of,
)
from syncline._torch.tensors import sparse_tensor
from syncline.torch_backend.arguments import (
    check,
    check_none,
    check_tag,
    checked_pairs,
    is_in_memory,
    only,
    split_sizes,
)
from syncline.torch_backend.work import ENDED, BackendWork, Finisher
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.work import CombinedWork, Work

BACKEND = "syncline"

_NUM_TERMS = 65535
"""How many exchanges have different numbers, so that a message of one never arrives in another."""

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


class Collectives:
    """The base class of a process group that implements all of torch's collectives, under torch's method names.

    The transport serves CPU tensors. For tensors on another device, the methods use the group of `group_for`.

    Args:
        transport: the transport of the group. The group closes it.
        name: the name of the group.
        global_ranks: the members of the group, as ranks of the default group. The list is empty for the default group.
    """

    def __init__(self, transport: Transport, name: str, global_ranks: list[int]) -> None:
        self.transport = transport
        self._name = name
        self._global_ranks = global_ranks
        self._finisher = Finisher(name)
        self._coalesced: list[BackendWork] | None = None
        self._exchanges = itertools.count(1)
        """The numbers of the collectives that consist of messages. They are equal on all ranks, so a call takes its
        number before anything can fail."""
        self._options = C10dBackend.Options(BACKEND, timedelta(seconds=transport.timeout_seconds))
        self._options.global_ranks_in_group = global_ranks
        self._options.group_name = GroupName(name)

    @property
    def options(self) -> Any:
        return self._options

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return the process group for tensors on `device`, which is not the CPU.

        Raises:
            ValueError: no backend serves this device. This base class always raises this error.
        """
        if device.type == "meta":
            remedy = "Such a tensor has no data that could be sent. Create it on the CPU, or first give its module "
            remedy += 'memory with module.to_empty(device="cpu")'
        else:
            backend = dist.Backend.default_device_backend_map.get(device.type, "<its backend>")
            remedy = "Create the group with a backend for each device, for instance "
            remedy += f'init_process_group("cpu:{BACKEND},{device.type}:{backend}")'
        raise ValueError(
            f"this process group is for CPU tensors only, got a tensor on the device {device.type}. {remedy}"
        )

    # ------------------------------------------------------------------ lifetime

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    supports_splitting = True
    supports_coalescing = False
    # A Python class that inherits these from torch 2.15 raises RecursionError.
    supports_reconfigure = supports_window = supports_shrinking = _supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.transport.timeout_seconds = timeout.total_seconds()
        set_timeout_of(self._options, timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.transport.statistics().total_calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing. Torch calls this for a new group, whose ranks have made no calls yet."""

    def _wait_for_pending_works(self) -> None:
        for work in list(self._finisher.pending):
            work.wait()

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if type(tensors) is list and len(tensors) == 1 and opts is not None:  # the hot path
            tensor, op = tensors[0], opts.reduceOp
            name = "sum" if op == _SUM else _NAMES.get(op.op)
            if name is not None and tensor.is_cpu and is_in_memory(tensor) and tensor.is_contiguous():
                return self._ended_or_under_way(opts, self.transport.all_reduce(tensor, name), tensors)
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        opts = with_option(dist.AllreduceOptions, opts, "reduceOp")
        tensor = only("all_reduce", tensors)
        if other := self._other_group(tensor):
            return other.allreduce(tensors, opts)
        if tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        check("all_reduce", self.transport, tensors)
        work, finish = self._start_all_reduce(tensor, opts.reduceOp)
        return self._ended_or_under_way(opts, work, tensors, finish)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = with_option(dist.AllreduceCoalescedOptions, opts, "reduceOp")
        if other := self._other_group(*tensors):
            return other.allreduce_coalesced(tensors, opts)
        check("all_reduce_coalesced", self.transport, tensors, is_of_one_dtype=False)
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
        check("reduce", self.transport, tensors, opts=opts)
        is_root = self.transport.rank == opts.rootRank
        # Ranks other than the root keep their input.
        reduced = tensor if is_root else tensor.detach().clone(memory_format=torch.contiguous_format)
        work, finish = self._start_all_reduce(reduced, opts.reduceOp, terms=1 + opts.rootRank)
        return self._ended_or_under_way(opts, work, [tensor, reduced], finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = with_option(dist.ReduceScatterOptions, opts, "reduceOp")
        if other := self._other_group(output):
            return reduce_scatter_flat(other, output, input, opts)
        check("reduce_scatter_tensor", self.transport, [output, input], whole="input")
        part = fillable(output)
        work = self.transport.reduce_scatter(part, flat(input), _reduction(opts.reduceOp))
        return self._ended_or_under_way(opts, work, [output, input], copy_back((output, part)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        is_plain = isinstance(outputs, Tensor)
        output = outputs if is_plain else only("reduce_scatter", outputs)
        parts = inputs if is_plain else only("reduce_scatter", inputs)
        opts = with_option(dist.ReduceScatterOptions, opts, "reduceOp")
        if other := self._other_group(output):
            return other.reduce_scatter([output], [parts], opts)
        check("reduce_scatter", self.transport, [output], parts)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        op = _reduction(opts.reduceOp)
        if len({part.numel() for part in parts}) == 1:
            mine = fillable(output)
            work = self.transport.reduce_scatter(mine, whole, op)
        else:
            work = self.transport.all_reduce(whole, op)
            mine = whole.split([part.numel() for part in parts])[self.transport.rank]
        return self._ended_or_under_way(opts, work, [output, whole], copy_back((output, mine)))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = with_option(dist.ReduceScatterOptions, opts, "reduceOp")
        if other := self._other_group(*outputs):
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        pairs = checked_pairs("reduce_scatter_tensor", self.transport, outputs, inputs, whole="input")
        works: list[Any] = [self.reduce_scatter_single(*pair, opts.reduceOp) for pair in pairs]
        return self._ended_or_under_way(opts, CombinedWork.of(works), outputs)

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

    # ------------------------------------------------------------------ data

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        opts = with_option(dist.BroadcastOptions, opts, "rootRank")
        tensor = only("broadcast", tensors)
        if other := self._other_group(tensor):
            return other.broadcast(tensors, opts)
        check("broadcast", self.transport, tensors, opts=opts)
        wire = flat(tensor)
        work = self.transport.broadcast(wire, opts.rootRank)
        return self._ended_or_under_way(opts, work, tensors, copy_back((tensor, wire)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if other := self._other_group(output):
            return all_gather_flat(other, output, input, opts or AllgatherOptions())
        check("all_gather_into_tensor", self.transport, [output, input], whole="output")
        whole = fillable(output)
        work = self.transport.all_gather(whole, flat(input))
        return self._ended_or_under_way(opts, work, [output, input], copy_back((output, whole)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        is_plain = isinstance(inputs, Tensor)
        parts = outputs if is_plain else only("all_gather", outputs)
        input = inputs if is_plain else only("all_gather", inputs)
        if other := self._other_group(input):
            return other.allgather([parts], [input], opts or AllgatherOptions())
        check("all_gather", self.transport, [input], parts)
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
        if other := self._other_group(*inputs):
            return other.allgather_coalesced(outputs, inputs, opts or AllgatherOptions())
        for row in outputs or [[]]:
            checked_pairs("all_gather_coalesced", self.transport, row, inputs)
        lists = [list(parts) for parts in zip(*outputs, strict=True)]
        for parts, input in zip(lists, inputs, strict=True):
            check("all_gather", self.transport, [input], parts)
        works: list[Any] = [
            self.allgather([parts], [input]) for parts, input in zip(lists, inputs, strict=True)
        ]
        result = [tensor for row in outputs for tensor in row]
        return self._ended_or_under_way(opts, CombinedWork.of(works), result)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        if other := self._other_group(*outputs):
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts or AllgatherOptions())
        pairs = checked_pairs("all_gather_into_tensor", self.transport, outputs, inputs, whole="output")
        works: list[Any] = [self.all_gather_single(*pair) for pair in pairs]
        return self._ended_or_under_way(opts, CombinedWork.of(works), outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        exchange, input = next(self._exchanges), only("gather", inputs)
        if other := self._other_group(input):
            return other.gather(outputs, inputs, opts)
        if self.transport.rank != opts.rootRank:
            check("gather", self.transport, inputs, opts=opts)
            check_none("gather", outputs, opts.rootRank)
            return self._messages(exchange, opts, [(flat(input), opts.rootRank)], [])
        parts = only("gather", outputs)
        check("gather", self.transport, inputs, parts, opts=opts)
        parts[opts.rootRank].copy_(input)
        return self._messages(exchange, opts, [], [(part, rank) for rank, part in enumerate(parts)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        exchange, output = next(self._exchanges), only("scatter", outputs)
        if other := self._other_group(output):
            return other.scatter(outputs, inputs, opts)
        if self.transport.rank != opts.rootRank:
            check("scatter", self.transport, outputs, opts=opts)
            check_none("scatter", inputs, opts.rootRank)
            return self._messages(exchange, opts, [], [(output, opts.rootRank)])
        parts = only("scatter", inputs)
        check("scatter", self.transport, outputs, parts, opts=opts)
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
        check("all_to_all", self.transport, [], outputs, inputs)
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
        check(name, self.transport, [output, input])
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
        check("send", self.transport, tensors)
        check_tag("send", tag)
        wire = flat(tensor)
        return self._ended_or_under_way(None, self.transport.send(wire, dst), [wire])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        tensor = only("recv", tensors)
        if other := self._other_group(tensor):
            return other.recv(tensors, src, tag)
        check("recv", self.transport, tensors)
        check_tag("recv", tag)
        target = fillable(tensor)
        work = self.transport.recv(target, src)
        return self._ended_or_under_way(None, work, tensors, copy_back((tensor, target)), src)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        if other := self._other_group(*tensors):
            return other.recv_anysource(tensors, tag)
        raise ValueError(
            "the syncline backend cannot receive a tensor from an unknown rank: pass the sender as src= to "
            "torch.distributed.recv"
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._ended_or_under_way(opts, self.transport.barrier(), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this method. After a timeout, raise an error that names the missing ranks.

        With this backend, the errors of other operations name the missing ranks, too.
        """
        self.transport.barrier().wait(timeout.total_seconds() if timeout else None)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        works: list[Any] = self._coalesced or []
        self._coalesced = None
        return self._ended_or_under_way(None, CombinedWork.of(works), [])

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

    def _ended_or_under_way(
        self,
        opts: Any,
        work: Work,
        result: list[Tensor],
        finish: Callable[[], object] | None = None,
        source: int = -1,
    ) -> dist.Work:
        """Return the work object of a call. For the arguments, see `BackendWork`. Without `opts`, the call is async."""
        if opts is not None and not opts.asyncOp:
            work.wait()
            if finish is not None:
                finish()
            return ENDED
        started = BackendWork(work, result, self._finisher, finish, source)
        if self._coalesced is not None:
            self._coalesced.append(started)
        return started

    def _other_group(self, *tensors: Tensor) -> dist.ProcessGroup | None:
        """Return the group that serves the device of the first tensor; None if this group does."""
        if tensors and not tensors[0].is_cpu:
            return self.group_for(tensors[0].device)
        return None

    def _messages(
        self, exchange: int, opts: Any, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]
    ) -> dist.Work:
        """Send and receive tensors, and complete the call. Skip messages from this rank to itself.

        The two ranks of a message compare its size, so empty tensors are sent, too. They also compare the number of
        this exchange, so a message of a call that has failed never arrives in a later call.

        Args:
            exchange: the number of this exchange, from `_exchanges`.
            opts: the options of the call.
            sends: the tensors to send, each with the receiving rank.
            recvs: the tensors to fill, each with the sending rank.
        """
        transport, copies = self.transport, []
        terms = exchange % _NUM_TERMS or _NUM_TERMS
        works = [
            transport.send(tensor, peer, terms=terms) for tensor, peer in sends if peer != transport.rank
        ]
        for tensor, peer in recvs:
            if peer != transport.rank:
                target = fillable(tensor)
                works.append(transport.recv(target.detach(), peer, terms=terms))
                copies.append((tensor, target))
        result = [tensor for tensor, _ in (*recvs, *sends)]
        return self._ended_or_under_way(opts, CombinedWork.of(works), result, copy_back(*copies))


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


# ---------------------------------------------------------------------- tensors


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor that a transport can read: `tensor` itself if possible, or else a contiguous copy of it."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def fillable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in which a transport can store a result: `tensor` itself if possible, or a new one."""
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def copy_back(*pairs: tuple[Tensor, Tensor]) -> Callable[[], object] | None:
    """Return a function that copies results to their targets. Return None if there is nothing to copy.

    Args:
        pairs: pairs of a target and its result. A pair whose target and result are the same tensor is not copied.
    """
    copies = [(target, result) for target, result in pairs if target is not result]
    if not copies:
        return None

    def finish() -> None:
        for target, result in copies:
            target.detach().copy_(result.view(target.shape))

    return finish


# ---------------------------------------------------------------------- options


def with_option(options: Any, given: Any, attribute: str) -> Any:
    """Return the options object of a call.

    Args:
        options: the class of the options.
        given: the argument of the call: an options object, the plain value of `attribute`, or None.
        attribute: the name of the attribute to set if `given` is a plain value.
    """
    if given is not None and hasattr(given, attribute):
        return given
    made = options()
    if given is not None:
        setattr(made, attribute, given)
    return made
