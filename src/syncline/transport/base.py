"""The transport contract: operations on flat tensors, each of which returns a `Work`.

An engine is a subclass of `Transport` that implements the `_start_*` methods. Strategies, buckets and verbs do not
depend on the engine. The public methods of `Transport` are final and the same for every engine: they check the
arguments, count the bytes and measure the time spent waiting.

Ranks are numbered within the transport's own group, from 0 to `size - 1`. All tensors are dense and contiguous. The
caller must not use a tensor between the call that starts the operation and the return of `Work.wait`. All ranks must
start the operations of one transport in the same order, but each rank can wait for them in any order. If ranks start
some calls in different orders, these calls need separate lanes (see `Transport.lane`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.liveness.board import Board
from syncline.transport.caller_lock import Turn
from syncline.transport.statistics import Counts, Statistics
from syncline.transport.work import DONE, CombinedWork, MeasuredWork, Work
from syncline.words import one_line

ReduceOp = Literal["sum", "mean", "max", "min", "product"]

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_REDUCIBLE: dict[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), REDUCE_OPS),
    **dict.fromkeys(_INTEGERS, ("sum", "max", "min", "product")),
    **dict.fromkeys((torch.complex64, torch.complex128), ("sum", "mean")),
    torch.bool: ("max", "min"),
}
"""The reduce operations for each dtype that every engine can reduce. Engines only copy tensors of other dtypes."""


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reduce operations that every engine supports for a dtype. If there are none, return ()."""
    return _REDUCIBLE.get(dtype, ())


def unknown_op(op: object) -> ValueError:
    """Return the error for an `op` that is not a reduce operation of Syncline.

    If `op` is a `torch.distributed.ReduceOp`, the error names the equivalent string.

    Examples:
        >>> unknown_op("median").args[0][:26], unknown_op(torch.distributed.ReduceOp.AVG).args[0][-28:]
        ('expected op to be one of s', ' RedOpType.AVG: write "mean"')
    """
    words = f"expected op to be one of {', '.join(REDUCE_OPS)}; got "
    if isinstance(op, str):
        return ValueError(f"{words}{op!r}")
    name = str(op).rpartition(".")[2].lower().replace("avg", "mean")
    return ValueError(f'{words}{op}: write "{name}"' if name in REDUCE_OPS else f"{words}{op!r}")


class Team(NamedTuple):
    """A set of ranks that together hold each shard of the sharded state exactly once.

    If there are several teams, each of them holds the whole sharded state.
    """

    members: tuple[int, ...]
    """The ranks of the first team. The value is equal on all ranks, so that all ranks fetch shards from this team."""
    position: int
    """The index of this rank in its own team."""

    @property
    def size(self) -> int:
        """The number of ranks in each team."""
        return len(self.members)


class Transport(ABC):
    """The base class of engines, which move flat tensors between the ranks of one group.

    Args:
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
        board: the object that records where in the program this rank is. Pass the board of the larger transport if the
            new transport is a part of it. Pass None to create a new board.
    """

    def __init__(self, *, rank: int, size: int, timeout_seconds: float, board: Board | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"expected a rank from 0 to size - 1; got rank {rank} and size {size}")
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"expected a finite timeout_seconds above 0, got {timeout_seconds}")
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.board = Board() if board is None else board
        """The record of where in the program this rank is, updated by users of the transport. All lanes use it."""
        self.turn = Turn()
        """The lock that a thread holds during a call that consists of several operations."""
        self.counts = Counts()
        """The counters of calls, bytes and waiting time. All lanes use the same object; see `Counts.in_background`."""
        self._common_lanes: dict[str, Transport] = {}
        self._num_named: Counter[str] = Counter()

    def __repr__(self) -> str:
        return one_line(self, f"{self.name}, rank {self.rank} of {self.size}")

    def __copy__(self) -> Self:
        """Return a shallow copy of this transport, to be used as a lane. Only `turn` is a new object."""
        lane = object.__new__(type(self))
        lane.__dict__.update(self.__dict__)
        lane.turn = self.turn.again()
        return lane

    # ------------------------------------------------------------------ operations for users of a transport

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, terms: int = 0) -> Work:
        """Reduce `tensor` over all ranks, in place. All ranks get bitwise equal results.

        An `op` of "mean" raises ValueError for integers, because the rounding would depend on the engine.

        Args:
            tensor: a tensor with the same number of elements on all ranks.
            op: the reduce operation.
            terms: a number that the engine compares between the ranks, together with the call. Pass 0 for no number. If
                the numbers or the calls differ, and no rank passed 0, `Work.wait` raises `Disagreement` on every rank,
                and the transport can still be used. Engines whose `sees_calls` is False ignore `terms`.
        """
        self._check_reduction(op, tensor)
        return self._started("all_reduce", tensor, self._start_all_reduce(tensor, op, terms))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce `input` over all ranks, and write one part of the result to `output` on each rank.

        `input` has size * n elements. Rank r gets elements r * n to (r + 1) * n in its `output`, which has n elements.
        """
        self._check_reduction(op, input)
        self._check_parts("reduce_scatter", whole=input, part=output)
        return self._started("reduce_scatter", input, self._start_reduce_scatter(output, input, op))

    def reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp = "sum") -> Work:
        """Reduce `tensor` over all ranks, so that each rank has the result in its own span of the tensor.

        Usually all ranks are one team (see `team`). Member p of each team gets the reduced elements from `bounds[p]`
        up to `bounds[p + 1]`. Afterwards, all other elements of its `tensor` are undefined.

        Args:
            tensor: a flat tensor with the same number of elements on all ranks. It is reduced in place.
            bounds: the offsets at which the spans begin and end, in ascending order from 0 to the number of elements.
                They are the same on all ranks. A team with n members needs n + 1 bounds.
            op: the reduce operation.
        """
        self._check_reduction(op, tensor)
        num_bounds, numel = self.team(tensor.device).size + 1, tensor.numel()
        is_ascending = list(bounds) == sorted(bounds)
        if not is_ascending or len(bounds) != num_bounds or (bounds[0], bounds[-1]) != (0, numel):
            raise ValueError(
                f"expected {num_bounds} bounds in ascending order, from 0 to {numel}; got {list(bounds)}"
            )
        return self._started("reduce_spans", tensor, self._start_reduce_spans(tensor, bounds, op))

    def all_gather(self, output: Tensor, input: Tensor, *, terms: int = 0) -> Work:
        """Gather the `input` of every rank into `output`, in rank order.

        `input` has n elements, and `output` has size * n elements. For `terms`, see `all_reduce`.
        """
        self._check_parts("all_gather", whole=output, part=input)
        return self._started("all_gather", output, self._start_all_gather(output, input, terms))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Copy rank `src`'s `tensor` into the `tensor` of every other rank."""
        self._check_rank("src", src)
        self._check_flat(tensor)
        return self._started("broadcast", tensor, self._start_broadcast(tensor, src))

    def send(self, tensor: Tensor, dst: int, *, terms: int = 0) -> Work:
        """Send `tensor` to rank `dst`, which must call `recv`. Messages from one rank to another arrive in order.

        Args:
            tensor: the tensor.
            dst: the receiving rank.
            terms: a number from 0 to 65535 that shared memory compares with that of the `recv`, together with the dtype
                and the number of elements. Other engines ignore it.
        """
        self._check_peer("dst", dst)
        self._check_flat(tensor)
        return self._started("send", tensor, self._start_send(tensor, dst, terms))

    def recv(self, tensor: Tensor, src: int, *, terms: int = 0) -> Work:
        """Receive a tensor from rank `src` into `tensor`.

        `tensor` must have the same dtype and number of elements as the tensor that `src` sends. For `terms`, see
        `send`.
        """
        self._check_peer("src", src)
        self._check_flat(tensor)
        return self._started("recv", tensor, self._start_recv(tensor, src, terms))

    def barrier(self) -> Work:
        """Start a barrier. The barrier is complete once every rank has called this method."""
        return self._started("barrier", None, self._start_barrier())

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order; a collective call that blocks.

        The payloads can have different lengths. Use this method for small control data only.
        """
        if self.size == 1:
            return [payload]
        lengths = gather_tensor(self, torch.tensor([len(payload)], device="cpu")).flatten().tolist()
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = gather_tensor(self, padded)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def statistics(self) -> Statistics:
        """Return this rank's counts of calls, bytes and waiting time on all lanes, since the transport was created."""
        return Statistics(**dataclasses.asdict(self.counts))

    def lane(self, purpose: str) -> Transport:
        """Return a lane: a transport between the same ranks, for one purpose. A collective call.

        If the engine could mix up different calls on one connection, each lane has its own connection. Calls on
        different lanes are then never matched with each other, so ranks can make them in different orders. Other
        engines return the transport itself.

        All lanes of a transport have the same board, timeout and statistics. A failure on one lane breaks all of them.
        Closing a lane ends that lane only. Closing the transport closes its lanes.

        Args:
            purpose: the name of the lane in messages, in one or two words, such as "gradients". It is the same on all
                ranks.
        """
        return self

    def common_lane(self, purpose: str) -> Transport:
        """Return the lane for `purpose`, which is created once. The first call for a purpose is collective."""
        if purpose not in self._common_lanes:
            self._common_lanes[purpose] = self.lane(purpose)
        return self._common_lanes[purpose]

    @property
    def sees_calls(self) -> bool:
        """Whether the engine raises an error if ranks make different calls.

        If this is False, the engine may mix up the data of these calls instead.
        """
        return False

    def rounds_once(self, device: torch.device) -> bool:
        """Return whether fp16 and bf16 tensors on `device` are summed in fp32 and rounded once.

        This method returns the same value on all ranks.
        """
        return False

    @property
    def reduces_in_place(self) -> bool:
        """Whether the transport reduces tensors from `allocate` faster than other tensors."""
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of zeros, in the memory that this engine reduces fastest; a collective call.

        All ranks must pass the same arguments. Reductions are fast only if they get the tensor itself, not a view of it
        (but see `narrow`). All lanes of this transport can use the tensor.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """Return a view of the first `numel` elements of a tensor from `allocate`.

        The view is reduced as fast as the whole tensor. `numel` must be the same on all ranks.
        """
        return tensor[:numel]

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return a flat tensor of zeros in memory that all members of a team have mapped; a collective call.

        All ranks must pass the same arguments. A value that one member writes is visible to all members. Callers must
        call `barrier` between a write and the reads of other members. Returns None if this engine has no shared memory.
        """
        return None

    def team(self, device: torch.device) -> Team:
        """Return the team to which this rank belongs. Each member of a team holds one shard of the sharded state.

        All ranks are one team, unless each host holds a full copy. Then the ranks of each host are a team.
        """
        return Team(tuple(range(self.size)), self.rank)

    # ------------------------------------------------------------------ methods that an engine implements

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the engine, as the contract shows it, such as "gloo" or "threads"."""

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of torch with the same ranks. The value is None if there is no such group."""
        return None

    @property
    def control_device(self) -> torch.device:
        """A device from which this engine can send small control data."""
        return torch.device("cpu")

    def sending_device(self, device: torch.device) -> torch.device:
        """Return the device to which a tensor on `device` must be copied before it is sent.

        The result is `control_device` for tensors on the CPU, else `device` itself.
        """
        return self.control_device if device.type == "cpu" else device

    @abstractmethod
    def split(self, color: int | None) -> Transport | None:
        """Return a transport between the ranks that pass the same `color`; a collective call.

        The ranks keep their order and are numbered from 0. Returns None on ranks whose `color` is None.
        """

    def leave(self) -> None:  # noqa: B027  (an engine without peers has nothing to do)
        """Publish to the other ranks that this rank makes no more calls.

        On engines between processes, waits for this rank then raise `UnevenInputs`. By default, nothing is published.
        """

    @abstractmethod
    def abort(self, reason: str, *, traceback: str = "") -> None:
        """End the group: every wait and every later operation raises an error with `reason`, on all reachable ranks.

        Args:
            reason: one line that says why.
            traceback: the traceback of the exception that ends this rank. It becomes a note of the errors of the peers.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this transport. The call is not collective. A second call has no effect."""

    @abstractmethod
    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work: ...

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        """Start a reduce_scatter if all spans have the same length, else an all_reduce.

        Engines that reduce spans of different lengths faster override this method.
        """
        each, rest = divmod(tensor.numel(), self.size)
        if rest or any(bounds[rank] != rank * each for rank in range(self.size)):
            return self._start_all_reduce(tensor, op)
        flat = tensor.detach().view(-1)
        # The result cannot be written into the tensor itself, because engines may read the tensor until the end.
        part = torch.empty(each, dtype=tensor.dtype, device=tensor.device)
        work = self._start_reduce_scatter(part, flat, op)
        own = flat[self.rank * each : (self.rank + 1) * each]
        return CombinedWork([(work, lambda: own.copy_(part))])

    @abstractmethod
    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_barrier(self) -> Work: ...

    # ------------------------------------------------------------------ checks and counters

    def numbered(self, name: str) -> str:
        """Return a name that is new on this transport: `name` at the first call, then "name 2", and so on.

        Ranks that make the same calls in the same order get the same names.
        """
        self._num_named[name] += 1
        nth = self._num_named[name]
        return name if nth == 1 else f"{name} {nth}"

    def _started(self, operation: str, tensor: Tensor | None, work: Work) -> Work:
        counts = self.counts
        calls = counts.num_calls
        calls[operation] = calls.get(operation, 0) + 1
        if tensor is not None:
            sizes = counts.payload_bytes
            sizes[operation] = sizes.get(operation, 0) + tensor.numel() * tensor.element_size()
        return work if work is DONE else MeasuredWork(work, counts)

    def _check_flat(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor; got a tensor of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}. Pass tensor.contiguous()"
            )

    def _check_reduction(self, op: str, tensor: Tensor) -> None:
        if tensor.is_contiguous() and op in _REDUCIBLE.get(tensor.dtype, ()):  # the hot path
            return
        if op not in REDUCE_OPS:
            raise unknown_op(op)
        self._check_flat(tensor)
        possible = reductions_of(tensor.dtype)
        if op not in possible:
            hint = (
                f"Use one of {', '.join(possible)}, or convert the tensor to another dtype"
                if possible
                else "This dtype cannot be reduced at all. Convert the tensor to another dtype"
            )
            raise ValueError(f"op={op!r} is not defined for {tensor.dtype}. {hint}")

    def _check_parts(self, operation: str, *, whole: Tensor, part: Tensor) -> None:
        self._check_flat(whole)
        self._check_flat(part)
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.size:
            raise ValueError(
                f"{operation} on {self.size} ranks: for a part of {part.numel()} elements of {part.dtype}, expected a "
                f"whole of {self.size} x {part.numel()} elements; got {whole.numel()} elements of {whole.dtype}"
            )

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"expected {what} to be a rank from 0 to {self.size - 1}; got {rank}")

    def _check_peer(self, what: str, rank: int) -> None:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(
                f"expected {what} to be another rank; got this rank itself, {rank}. Copy the tensor instead"
            )


def gather_tensor(transport: Transport, row: Tensor, *, terms: int = 0) -> Tensor:
    """Return the rows of all ranks as one tensor of shape (size, numel) on the CPU; a collective call that blocks.

    `row` is a flat tensor on the CPU, with the same number of elements and the same dtype on all ranks. For `terms`,
    see `Transport.all_reduce`.
    """
    mine = row.to(transport.control_device)
    everyone = torch.empty(transport.size * row.numel(), dtype=row.dtype, device=mine.device)
    transport.all_gather(everyone, mine, terms=terms).wait()
    return everyone.cpu().view(transport.size, -1)
