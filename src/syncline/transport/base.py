"""The transport contract: operations on flat tensors, each of which returns a `Work`.

Strategies, buckets and verbs do not depend on the engine. An engine implements the `_start_*` methods. The public
methods here are final and the same for every engine: they check the arguments, count the bytes and measure the time
spent waiting.

Ranks are numbered within the transport's own group, from 0 to `size - 1`. All tensors are dense and contiguous. They
belong to the transport from the call until `Work.wait` has returned. All ranks must start the operations of one
transport in the same order; they may wait for them in any order. Calls whose order differs between ranks need separate
lanes (see `Transport.lane`), and so do calls whose sizes must never be mixed up.
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

ReduceOp = Literal["sum", "mean", "max", "min", "product"]

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_REDUCIBLE: dict[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), REDUCE_OPS),
    **dict.fromkeys(_INTEGERS, ("sum", "max", "min", "product")),
    **dict.fromkeys((torch.complex64, torch.complex128), ("sum", "mean")),
    torch.bool: ("max", "min"),
}
"""The dtypes that every engine can reduce, and by which operations. Engines move other dtypes only unchanged."""


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the operations by which every engine can reduce tensors of a dtype; empty if there are none."""
    return _REDUCIBLE.get(dtype, ())


def unknown_op(op: object) -> ValueError:
    """Return the error for an unknown `op`. For an operation of torch, the text names the equivalent here.

    Example:
        >>> unknown_op("median").args[0][:26], unknown_op(torch.distributed.ReduceOp.AVG).args[0][-28:]
        ('expected op to be one of s', ' RedOpType.AVG: write "mean"')
    """
    words = f"expected op to be one of {', '.join(REDUCE_OPS)}; got "
    if isinstance(op, str):
        return ValueError(f"{words}{op!r}")
    name = str(op).rpartition(".")[2].lower().replace("avg", "mean")
    return ValueError(f'{words}{op}: write "{name}"' if name in REDUCE_OPS else f"{words}{op!r}")


class Team(NamedTuple):
    """A set of ranks that together hold every shard exactly once. If there are several teams, each has a full copy."""

    members: tuple[int, ...]
    """The ranks of the first team, also on ranks of other teams, so that all ranks can get the shards from there."""
    position: int
    """The index of this rank in its own team."""

    @property
    def size(self) -> int:
        """The number of ranks in a team."""
        return len(self.members)


class Transport(ABC):
    """The base class of engines, which move flat tensors between the ranks of one group.

    Args:
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
        board: the board of a transport of which the new transport is a part; None for a new board.
    """

    def __init__(self, *, rank: int, size: int, timeout_seconds: float, board: Board | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"expected a rank from 0 to size - 1, got rank {rank} of size {size}")
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"expected a finite timeout_seconds above 0, got {timeout_seconds}")
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.board = Board() if board is None else board
        """The position of this rank in the program, which users of the transport write. All lanes use one board."""
        self.turn = Turn()
        """A lock that a thread holds while its call runs several operations."""
        self._counts = Counts()
        self._common_lanes: dict[str, Transport] = {}
        self._num_lanes_for: Counter[str] = Counter()

    def __copy__(self) -> Self:
        """Return a copy for a lane. The copy has the same objects as this transport, except for a new `turn`."""
        lane = object.__new__(type(self))
        lane.__dict__.update(self.__dict__)
        lane.turn = self.turn.again()
        return lane

    # ------------------------------------------------------------------ operations for users of a transport

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, terms: int = 0) -> Work:
        """Reduce `tensor` over all ranks, in place. Every rank gets the same bits.

        The "mean" of integers raises, because its rounding would depend on the engine.

        Args:
            tensor: a tensor with the same number of elements on all ranks.
            op: the reduction.
            terms: a number that the ranks compare, or 0 to compare nothing. If the terms or the calls differ, and all
                ranks gave terms, `Work.wait` raises `Disagreement` on every rank, and the transport can still be used.
                Engines whose `sees_calls` is False ignore the terms.
        """
        self._check_reduction(op, tensor)
        return self._started("all_reduce", tensor, self._start_all_reduce(tensor, op, terms))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce `input` (size * n elements) over all ranks, and write the r-th part to rank r's `output` (n)."""
        self._check_reduction(op, input)
        self._check_parts("reduce_scatter", whole=input, part=output)
        return self._started("reduce_scatter", input, self._start_reduce_scatter(output, input, op))

    def reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp = "sum") -> Work:
        """Reduce `tensor` over all ranks, in place; member p of each team gets elements `bounds[p]` to `bounds[p + 1]`.

        All other elements of the tensor are undefined afterwards.

        Args:
            tensor: a flat tensor with the same number of elements on all ranks.
            bounds: offsets that do not decrease, from 0 to the number of elements, the same on all ranks. There is one
                offset more than a team has members. (Usually all ranks are one team, see `team`.)
            op: the reduction.
        """
        self._check_reduction(op, tensor)
        num_bounds, numel = self.team(tensor.device).size + 1, tensor.numel()
        is_ascending = list(bounds) == sorted(bounds)
        if not is_ascending or len(bounds) != num_bounds or (bounds[0], bounds[-1]) != (0, numel):
            raise ValueError(
                f"expected {num_bounds} bounds that do not decrease, from 0 to {numel}, got {list(bounds)}"
            )
        return self._started("reduce_spans", tensor, self._start_reduce_spans(tensor, bounds, op))

    def all_gather(self, output: Tensor, input: Tensor, *, terms: int = 0) -> Work:
        """Gather every rank's `input` (n elements) into `output` (size * n elements), in rank order.

        For `terms`, see `all_reduce`.
        """
        self._check_parts("all_gather", whole=output, part=input)
        return self._started("all_gather", output, self._start_all_gather(output, input, terms))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Copy rank `src`'s `tensor` into the `tensor` of every other rank."""
        self._check_rank("src", src)
        self._check_flat(tensor)
        return self._started("broadcast", tensor, self._start_broadcast(tensor, src))

    def send(self, tensor: Tensor, dst: int) -> Work:
        """Send `tensor` to rank `dst`, which must call `recv`. Messages between two ranks keep their order."""
        self._check_peer("dst", dst)
        self._check_flat(tensor)
        return self._started("send", tensor, self._start_send(tensor, dst))

    def recv(self, tensor: Tensor, src: int) -> Work:
        """Receive a tensor from rank `src` into `tensor`. Number of elements and dtype must be equal on both ranks."""
        self._check_peer("src", src)
        self._check_flat(tensor)
        return self._started("recv", tensor, self._start_recv(tensor, src))

    def barrier(self) -> Work:
        """Start a barrier, which is complete when every rank has called it."""
        return self._started("barrier", None, self._start_barrier())

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's `payload` in rank order; lengths may differ. The call blocks, and is for control data."""
        if self.size == 1:
            return [payload]
        lengths = gather_tensor(self, torch.tensor([len(payload)])).flatten().tolist()
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = gather_tensor(self, padded)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def statistics(self) -> Statistics:
        """Return the statistics of this rank since the transport was created, over all lanes."""
        return Statistics(**dataclasses.asdict(self._counts))

    def lane(self, purpose: str) -> Transport:
        """Return a transport between the same ranks for one purpose; by default this transport itself.

        If an engine mixes up different calls on one connection, each lane has a separate connection. Calls on different
        lanes then need no common order and are never matched with each other. All lanes of a transport have the same
        board, timeout and statistics. A failure on one lane breaks all of them. Closing a lane ends that lane only.
        Closing the transport closes its lanes. A collective call: every rank must make it, with the same purpose.

        Args:
            purpose: one or two words for messages, such as "gradients".
        """
        return self

    def common_lane(self, purpose: str) -> Transport:
        """Return the lane that all callers with the same `purpose` use. The first call for a purpose is collective."""
        if purpose not in self._common_lanes:
            self._common_lanes[purpose] = self.lane(purpose)
        return self._common_lanes[purpose]

    @property
    def sees_calls(self) -> bool:
        """Whether the engine raises if ranks make different calls, instead of mixing up their data."""
        return False

    def rounds_once(self, device: torch.device) -> bool:
        """Return whether 16-bit floats on a device are summed in fp32 and rounded once. All ranks return the same."""
        return False

    @property
    def reduces_in_place(self) -> bool:
        """Whether tensors in memory that `allocate` returns are reduced faster than other tensors."""
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of zeros, in the memory that this engine reduces fastest.

        A collective call: every rank must make it, with the same arguments. Pass the tensor itself to an operation,
        not a view of it. All lanes of this transport can use the tensor.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """Return the first `numel` elements of a tensor from `allocate`. They are reduced as fast as the whole tensor.

        `numel` must be the same on all ranks.
        """
        return tensor[:numel]

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return a flat tensor of zeros in memory that all members of a team share; None without shared memory.

        A collective call: every rank must make it, with the same arguments. All members see what one member writes.
        The callers must order their reads and writes by `barrier`.
        """
        return None

    def team(self, device: torch.device) -> Team:
        """Return the team that divides sharded state: all ranks, or the ranks of each host if each host has a copy."""
        return Team(tuple(range(self.size)), self.rank)

    # ------------------------------------------------------------------ methods that an engine implements

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the engine in the contract: "gloo", "threads", ..."""

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of torch with the same ranks; None if there is none."""
        return None

    @property
    def control_device(self) -> torch.device:
        """A device from which this engine can send small control data."""
        return torch.device("cpu")

    def sending_device(self, device: torch.device) -> torch.device:
        """Return the device to send tensors of `device` from: `device`, or `control_device` for tensors on the CPU."""
        return self.control_device if device.type == "cpu" else device

    @abstractmethod
    def split(self, color: int | None) -> Transport | None:
        """Return a transport between the ranks that gave the same `color`, in rank order; None if `color` is None.

        A collective call: every rank must make it.
        """

    def leave(self) -> None:  # noqa: B027  (an engine without peers has nothing to do)
        """Publish that this rank makes no more calls. Peers that wait for this rank raise `UnevenInputs`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every wait and every later operation raise, on all ranks that can be reached."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources. This is no collective call. A second call has no effect."""

    @abstractmethod
    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work: ...

    @abstractmethod
    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work: ...

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        """Start a reduce_scatter if all spans have the same length, else an all_reduce. Engines may override this."""
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
    def _start_send(self, tensor: Tensor, dst: int) -> Work: ...

    @abstractmethod
    def _start_recv(self, tensor: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _start_barrier(self) -> Work: ...

    # ------------------------------------------------------------------ checks and counters

    def _next_lane_name(self, purpose: str) -> str:
        """Return a new name for a lane, for messages: "gradients", then "gradients 2" for the same purpose."""
        self._num_lanes_for[purpose] += 1
        nth = self._num_lanes_for[purpose]
        return purpose if nth == 1 else f"{purpose} {nth}"

    def _started(self, operation: str, tensor: Tensor | None, work: Work) -> Work:
        counts = self._counts
        calls = counts.num_calls
        calls[operation] = calls.get(operation, 0) + 1
        if tensor is not None:
            sizes = counts.payload_bytes
            sizes[operation] = sizes.get(operation, 0) + tensor.numel() * tensor.element_size()
        return work if work is DONE else MeasuredWork(work, counts)

    def _check_flat(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: pass tensor.contiguous() or its flat storage"
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
                f"use one of {', '.join(possible)}, or convert the tensor to another dtype first"
                if possible
                else "convert the tensor to a dtype that can be reduced first"
            )
            raise ValueError(f"op={op!r} is not defined for {tensor.dtype}: {hint}")

    def _check_parts(self, operation: str, *, whole: Tensor, part: Tensor) -> None:
        self._check_flat(whole)
        self._check_flat(part)
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.size:
            raise ValueError(
                f"{operation} on {self.size} ranks: expected a whole of {self.size} x {part.numel()} elements of "
                f"{part.dtype}, got {whole.numel()} elements of {whole.dtype}"
            )

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"expected {what} between 0 and {self.size - 1}, got {rank}")

    def _check_peer(self, what: str, rank: int) -> None:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(
                f"expected {what} to be another rank, got this rank, {rank}: copy the tensor instead"
            )


def gather_tensor(transport: Transport, row: Tensor, *, terms: int = 0) -> Tensor:
    """Return every rank's `row` as one tensor (size, numel) on the CPU, in rank order; a collective call that blocks.

    `row` is a flat tensor on the CPU, with the same number of elements and the same dtype on all ranks.
    """
    mine = row.to(transport.control_device)
    everyone = torch.empty(transport.size * row.numel(), dtype=row.dtype, device=mine.device)
    transport.all_gather(everyone, mine, terms=terms).wait()
    return everyone.cpu().view(transport.size, -1)
