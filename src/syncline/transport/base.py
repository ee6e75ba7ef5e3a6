"""The transport contract: seven operations on flat tensors, each returning a `Work`.

A strategy, a bucket or a verb never knows which engine it runs on. An engine implements the `_start_*`
methods; the public methods here check the arguments, count what is moved and measure what is waited for,
the same for every engine, and are final.

Ranks are those of the transport's own group, 0 to `size - 1`. All tensors are dense and contiguous; they
belong to the transport from the call until `Work.wait` has returned. Operations of one transport must be
started in the same order on all ranks; they may be waited for in any order. Kinds of talk whose order differs
from rank to rank, or whose sizes must never meet, take a lane each.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.errors import CollectiveMismatch
from syncline.liveness.board import Board
from syncline.transport.caller_lock import Turn
from syncline.transport.cost import sent_bytes

__all__ = [
    "DONE",
    "REDUCE_OPS",
    "Disagreement",
    "ReduceOp",
    "Statistics",
    "Team",
    "Transport",
    "Work",
    "reductions_of",
    "unknown_op",
]


ReduceOp = Literal["sum", "mean", "max", "min", "product"]

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)

# What every engine reduces, and by which operations; everything else can be moved, but not reduced.
_REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_REDUCIBLE: dict[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys(_REALS, REDUCE_OPS),
    **dict.fromkeys(_INTEGERS, ("sum", "max", "min", "product")),
    **dict.fromkeys((torch.complex64, torch.complex128), ("sum", "mean")),
    torch.bool: ("max", "min"),
}


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """By what tensors of a dtype can be reduced, on every engine; by nothing, if it is empty."""
    return _REDUCIBLE.get(dtype, ())


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a transport has done since it was made, on this rank."""

    num_calls: dict[str, int] = field(default_factory=dict)
    """Operations started, by name; `all_gather_bytes` counts as the collectives it consists of."""
    payload_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors handed in, by operation (not what an algorithm makes of them on the wire)."""
    waited_seconds: float = 0.0
    """Time spent blocked in `Work.wait`."""

    @property
    def total_calls(self) -> int:
        return sum(self.num_calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values())

    def sent_bytes(self, num_ranks: int) -> float:
        """Bytes that this rank has sent, by the usual algorithms: see `plan.cost.sent_bytes`."""
        sizes = self.payload_bytes.items()
        return sum(sent_bytes(operation, num_bytes, num_ranks) for operation, num_bytes in sizes)

    def __sub__(self, earlier: Statistics) -> Statistics:
        """What happened between `earlier` and this."""

        def minus(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
            return {name: n for name in now if (n := now[name] - then.get(name, 0))}

        return replace(
            self,
            num_calls=minus(self.num_calls, earlier.num_calls),
            payload_bytes=minus(self.payload_bytes, earlier.payload_bytes),
            waited_seconds=self.waited_seconds - earlier.waited_seconds,
        )


class _Counts:
    """What `Statistics` is made of; the lanes of one transport count together."""

    __slots__ = ("num_calls", "payload_bytes", "waited_seconds")

    def __init__(self) -> None:
        self.num_calls: dict[str, int] = {}
        self.payload_bytes: dict[str, int] = {}
        self.waited_seconds = 0.0


class Disagreement(CollectiveMismatch):
    """The ranks met in calls with different terms. Nothing was written, and the transport can still be used."""


class Work(ABC):
    """One operation under way. Keep it until it has been waited for.

    An error in `wait` is the end of the transport: every later operation on it raises as well.
    """

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done and its tensors may be used.

        Args:
            timeout_seconds: how long to wait; None means the transport's own timeout.

        Raises:
            CollectiveTimeout: a rank did not arrive in time.
            PeerLost: a rank's process or connection is gone.
            PeerFailed: a rank ended by an exception of its own.
            CollectiveMismatch: the ranks met with different operations or sizes.
            Disagreement: they did, or their terms differ, and all calls had terms.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Never blocks, never raises."""


class _DoneWork(Work):
    """An operation that was finished when it was started (a group of one rank)."""

    __slots__ = ()

    def wait(self, timeout_seconds: float | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE: Work = _DoneWork()


class _ThenCopyWork(Work):
    """Ends with a copy of the result to where it was asked for."""

    __slots__ = ("_inner", "_part", "_target")

    def __init__(self, inner: Work, target: Tensor, part: Tensor) -> None:
        self._inner = inner
        self._target = target
        self._part: Tensor | None = part

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._part is not None:
            self._inner.wait(timeout_seconds)
            self._target.copy_(self._part)
            self._part = None

    def is_completed(self) -> bool:
        return self._part is None or self._inner.is_completed()


class _MeasuredWork(Work):
    """Adds the time spent in `wait` to the transport's statistics."""

    __slots__ = ("_counts", "_inner")

    def __init__(self, inner: Work, counts: _Counts) -> None:
        self._inner = inner
        self._counts = counts

    def wait(self, timeout_seconds: float | None = None) -> None:
        start = time.perf_counter()
        try:
            self._inner.wait(timeout_seconds)
        finally:
            self._counts.waited_seconds += time.perf_counter() - start

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def unknown_op(op: object) -> ValueError:
    """What to raise where `op` is none of ours; one of torch's is told its name here.

    Example:
        >>> unknown_op("median").args[0][:26], unknown_op(torch.distributed.ReduceOp.AVG).args[0][-28:]
        ('expected op to be one of s', ' RedOpType.AVG: write "mean"')
    """
    words = f"expected op to be one of {', '.join(REDUCE_OPS)}; got "
    if isinstance(op, str):
        return ValueError(f"{words}{op!r}")
    name = str(op).rpartition(".")[2].lower()
    name = {"avg": "mean"}.get(name, name)
    return ValueError(f'{words}{op}: write "{name}"' if name in REDUCE_OPS else f"{words}{op!r}")


class Team(NamedTuple):
    """Ranks that together have all of what is sharded, once. There may be several, which then have the same."""

    members: tuple[int, ...]
    """The ranks of the first team: told the same on all ranks, so all of them can ask these for the whole."""
    position: int
    """Where this rank stands in its own team."""

    @property
    def size(self) -> int:
        """How many ranks a team has."""
        return len(self.members)


class Transport(ABC):
    """Moves flat tensors between the ranks of one group.

    Args:
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
        board: where this rank is, for a part of another transport; None for a new one.
    """

    def __init__(self, *, rank: int, size: int, timeout_seconds: float, board: Board | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"expected 0 <= rank < size, got rank {rank} of size {size}")
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"expected a finite timeout above 0 seconds, got {timeout_seconds}")
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.board = Board() if board is None else board
        """Where this rank is, told by whoever uses the transport; one object for all its lanes and parts."""
        self.turn = Turn()
        """Held by a thread for as long as what it calls takes several operations."""
        self._counts = _Counts()
        self._common_lanes: dict[str, Transport] = {}

    def __copy__(self) -> Self:
        """For a lane: what it does not have in common is its turn."""
        lane = object.__new__(type(self))
        lane.__dict__.update(self.__dict__)
        lane.turn = self.turn.again()
        return lane

    # ------------------------------------------------------------------ what users of a transport call

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, terms: int = 0) -> Work:
        """Reduce `tensor` over all ranks, in place; every rank ends with the same bits.

        "mean" of integers is refused (its rounding would be an engine's choice).

        Args:
            tensor: the same number of elements on all ranks.
            op: how.
            terms: for ranks that have not agreed on this call yet: a number other than 0 that must be the same on all.
                Where all calls that meet have terms, and calls or terms differ, every rank's `Work.wait` raises
                `Disagreement`, and the transport can still be used. An engine that does not see calls ignores it.
        """
        self._check_reduction(op, tensor)
        return self._started("all_reduce", tensor, self._start_all_reduce(tensor, op, terms))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce `input` (size * n elements); rank r ends with the r-th n elements in `output`."""
        self._check_reduction(op, input)
        self._check_parts("reduce_scatter", whole=input, part=output)
        return self._started("reduce_scatter", input, self._start_reduce_scatter(output, input, op))

    def reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp = "sum") -> Work:
        """Reduce `tensor` over all ranks so that member p of each team ends with its elements `bounds[p]` to
        `bounds[p + 1]`, in place.

        The rest of the tensor is undefined afterwards: it is what another rank has, or what it was.

        Args:
            tensor: flat, with as many elements on all ranks.
            bounds: offsets that do not decrease, from 0 to the number of elements, one more than a team has members
                (see `team`: as a rule the team is all ranks); the same on all ranks.
            op: how.
        """
        self._check_reduction(op, tensor)
        num_spans = self.team(tensor.device).size
        if (
            len(bounds) != num_spans + 1
            or bounds[0] != 0
            or bounds[-1] != tensor.numel()
            or list(bounds) != sorted(bounds)
        ):
            raise ValueError(
                f"expected {num_spans + 1} bounds that do not decrease, from 0 to {tensor.numel()}, got {list(bounds)}"
            )
        return self._started("reduce_spans", tensor, self._start_reduce_spans(tensor, bounds, op))

    def all_gather(self, output: Tensor, input: Tensor, *, terms: int = 0) -> Work:
        """Concatenate the ranks' `input` (n elements each) in rank order into `output` (size * n).

        `terms`: see `all_reduce`.
        """
        self._check_parts("all_gather", whole=output, part=input)
        return self._started("all_gather", output, self._start_all_gather(output, input, terms))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Copy rank `src`'s `tensor` into every other rank's."""
        self._check_rank("src", src)
        self._check_flat(tensor)
        return self._started("broadcast", tensor, self._start_broadcast(tensor, src))

    def send(self, tensor: Tensor, dst: int) -> Work:
        """Send `tensor` to rank `dst`, which must call `recv`. Messages between two ranks keep their order."""
        self._check_peer("dst", dst)
        self._check_flat(tensor)
        return self._started("send", tensor, self._start_send(tensor, dst))

    def recv(self, tensor: Tensor, src: int) -> Work:
        """Receive into `tensor` what rank `src` sends; shape and dtype must be the sender's."""
        self._check_peer("src", src)
        self._check_flat(tensor)
        return self._started("recv", tensor, self._start_recv(tensor, src))

    def barrier(self) -> Work:
        """Done when every rank has called it."""
        return self._started("barrier", None, self._start_barrier())

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload` (lengths may differ), in rank order. Blocks; for control data."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.control_device)
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.control_device)
        self.all_gather(lengths, length).wait()
        num_bytes = [int(n) for n in lengths.tolist()]
        widest = max(num_bytes)
        if not widest:
            return [b""] * self.size
        mine = torch.zeros(widest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = torch.zeros(self.size * widest, dtype=torch.uint8, device=self.control_device)
        self.all_gather(everyone, mine.to(self.control_device)).wait()
        rows = bytes(everyone.tolist())
        return [rows[r * widest : r * widest + num_bytes[r]] for r in range(self.size)]

    def statistics(self) -> Statistics:
        """What was moved and waited for so far, on this rank, on all lanes together."""
        counts = self._counts
        return Statistics(
            num_calls=dict(counts.num_calls),
            payload_bytes=dict(counts.payload_bytes),
            waited_seconds=counts.waited_seconds,
        )

    def lane(self, purpose: str) -> Transport:
        """A sibling among the same ranks for one kind of talk; here this transport itself.

        Where an engine mixes up calls that meet on one connection and differ, a lane has a connection of its own:
        calls on different lanes need no common order and never meet. Lanes share failure, board, timeout and
        statistics: when one breaks, all are broken. Closing a lane ends that lane only; closing the transport
        closes its lanes.

        A collective call: every rank must make it, with the same purpose.

        Args:
            purpose: what is said there, a word or two for messages: "gradients".
        """
        return self

    def common_lane(self, purpose: str) -> Transport:
        """The lane that all who name `purpose` share; a collective call for the first of them."""
        if purpose not in self._common_lanes:
            self._common_lanes[purpose] = self.lane(purpose)
        return self._common_lanes[purpose]

    @property
    def sees_calls(self) -> bool:
        """Whether ranks that call different things are told so, instead of being mixed up."""
        return False

    def rounds_once(self, device: torch.device) -> bool:
        """Whether 16-bit floats on a device are added up in fp32 and rounded once; the same on all ranks."""
        return False

    @property
    def reduces_in_place(self) -> bool:
        """Whether `allocate` gives memory that is worth to be moved to."""
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of zeros that this engine reduces best: in place where it can, without copying it first.

        A collective call: every rank must make it, with the same arguments. Pass the tensor itself to an operation,
        not a view of it; it can be used by all lanes of this transport.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """The first elements of what `allocate` gave, to be reduced as well as all of it; the same on all ranks."""
        return tensor[:numel]

    def share(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """One flat tensor of zeros for a team: what one of its members writes, all see. None: this engine cannot.

        A collective call: every rank must make it, with the same arguments, and all get None or none does. Who writes
        when is the callers' affair: `barrier` is what they have.
        """
        return None

    def team(self, device: torch.device) -> Team:
        """Among whom sharded state is divided: all ranks, unless each of several hosts has a copy of its own."""
        return Team(tuple(range(self.size)), self.rank)

    # ------------------------------------------------------------------ what an engine implements

    @property
    @abstractmethod
    def name(self) -> str:
        """The engine in a user's words, for the contract: "gloo", "threads", ..."""

    @property
    def group(self) -> ProcessGroup | None:
        """torch's process group of the same ranks; None where there is none."""
        return None

    @property
    def control_device(self) -> torch.device:
        """Where `all_gather_bytes` puts its tensors: a device that this engine can send from."""
        return torch.device("cpu")

    def sending_device(self, device: torch.device) -> torch.device:
        """From where to send what is on `device`: from there, unless that is the CPU and the engine cannot (NCCL)."""
        return self.control_device if device.type == "cpu" else device

    @abstractmethod
    def split(self, color: int | None) -> Transport | None:
        """A transport among the ranks that gave the same `color`, in rank order; None gives None.

        A collective call: every rank must make it.
        """

    def leave(self) -> None:  # noqa: B027  (an engine without peers has nobody to tell)
        """Tell the peers that this rank ends in good order: who still waits for it raises `UnevenInputs`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every wait under way and every later operation raise, on all ranks that can be reached."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport owns. Not a collective; safe to call twice."""

    @abstractmethod
    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work: ...

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        """For engines without one of their own: a reduce_scatter where the spans are equal, else an all_reduce."""
        each, rest = divmod(tensor.numel(), self.size)
        if rest or any(bounds[rank] != rank * each for rank in range(self.size)):
            return self._start_all_reduce(tensor, op)
        flat = tensor.detach().view(-1)
        # Not into the tensor itself: engines may read it until the end.
        part = torch.empty(each, dtype=tensor.dtype, device=tensor.device)
        work = self._start_reduce_scatter(part, flat, op)
        return _ThenCopyWork(work, flat[self.rank * each : (self.rank + 1) * each], part)

    @abstractmethod
    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _start_send(self, tensor: Tensor, dst: int) -> Work: ...

    @abstractmethod
    def _start_recv(self, tensor: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _start_barrier(self) -> Work: ...

    # ------------------------------------------------------------------ checks and counters

    def _started(self, operation: str, tensor: Tensor | None, work: Work) -> Work:
        counts = self._counts
        calls = counts.num_calls
        calls[operation] = calls.get(operation, 0) + 1
        if tensor is not None:
            sizes = counts.payload_bytes
            sizes[operation] = sizes.get(operation, 0) + tensor.numel() * tensor.element_size()
        return work if work is DONE else _MeasuredWork(work, counts)

    def _check_flat(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: pass a contiguous copy or its flat storage"
            )

    def _check_reduction(self, op: str, tensor: Tensor) -> None:
        if tensor.is_contiguous() and op in reductions_of(tensor.dtype):
            return
        if op not in REDUCE_OPS:
            raise unknown_op(op)
        self._check_flat(tensor)
        possible = reductions_of(tensor.dtype)
        if op not in possible:
            hint = (
                f"it can be reduced by {', '.join(possible)}; convert it first for anything else"
                if possible
                else "convert it to a type that can be reduced first"
            )
            raise ValueError(f"op={op!r} is not defined for {tensor.dtype}: {hint}")

    def _check_parts(self, operation: str, *, whole: Tensor, part: Tensor) -> None:
        self._check_flat(whole)
        self._check_flat(part)
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.size:
            raise ValueError(
                f"{operation} on {self.size} ranks: expected {self.size} x {part.numel()} elements of "
                f"{part.dtype}, got {whole.numel()} of {whole.dtype}"
            )

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"expected {what} between 0 and {self.size - 1}, got {rank}")

    def _check_peer(self, what: str, rank: int) -> None:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot be its own {what}: copy the tensor instead")
