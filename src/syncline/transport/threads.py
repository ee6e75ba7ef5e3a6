"""The engine whose ranks are threads of one process, for tests, for simulation, and for groups of one rank.

The engine is deterministic. Each reduction combines the ranks in the order 0 .. size - 1, so all ranks and all runs get
the same bits. fp16 and bf16 are summed in fp32 and rounded once. An operation copies its input when it starts, and
`Work.wait` writes the result, so a rank never reads a tensor while another rank changes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from syncline import tracebacks
from syncline.checks import suggests_arguments
from syncline.errors import PeerFailed
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Call, Failure
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.c10d_groups import fill
from syncline.transport.caller_lock import Turn
from syncline.transport.thread_rendezvous import CallMatcher, Rendezvous, closed_error
from syncline.transport.work import DONE, Work

T = TypeVar("T")


# ---------------------------------------------------------------------- the group


class ThreadGroup:
    """A group of ranks that are threads of this process.

    Args:
        size: number of ranks.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.

    Examples:
        >>> alone = ThreadGroup(1).transport(0)
        >>> alone.all_reduce(torch.ones(2), "mean").wait()
    """

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"expected the size of a thread group to be at least 1 rank, got {size}")
        self.size = size
        self._matcher = CallMatcher(size)
        self._transports = _transports(self._matcher, timeout_seconds, [None] * size)

    def transport(self, rank: int) -> ThreadsTransport:
        """Return the transport of `rank`. All calls with the same `rank` return the same object."""
        if not 0 <= rank < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}; got {rank}")
        return self._transports[rank]


def _transports(
    matcher: CallMatcher, timeout_seconds: float, boards: Sequence[Board | None]
) -> list[ThreadsTransport]:
    return [
        ThreadsTransport(matcher, rank=rank, timeout_seconds=timeout_seconds, board=board)
        for rank, board in enumerate(boards)
    ]


def transport_of_one_rank(timeout_seconds: float, board: Board | None = None) -> ThreadsTransport:
    """Create a group of one rank, and return its transport."""
    return _transports(CallMatcher(1), timeout_seconds, [board])[0]


# ---------------------------------------------------------------------- the transport


class _ThreadsWork(Work):
    """The work of one rank in a `Rendezvous`. The first `wait` copies the result to the rank's tensor."""

    __slots__ = ("_rendezvous", "_target", "_transport")

    def __init__(self, transport: ThreadsTransport, rendezvous: Rendezvous, target: Tensor | None) -> None:
        self._transport = transport
        self._rendezvous: Rendezvous | None = rendezvous
        self._target = target

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._rendezvous is None:
            return
        transport = self._transport
        timeout = transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        result = transport._matcher.wait(transport.rank, self._rendezvous, timeout)
        if self._target is not None:
            fill(self._target, result[transport.rank] if isinstance(result, list) else result)
            _synchronize(self._target)
        self._rendezvous = None

    def is_completed(self) -> bool:
        return self._rendezvous is None or self._rendezvous.has_ended


class ThreadsTransport(Transport):
    """The transport of one rank of a `ThreadGroup`. It must not be used by two threads at the same time."""

    def __init__(
        self, matcher: CallMatcher, *, rank: int, timeout_seconds: float, board: Board | None = None
    ) -> None:
        super().__init__(rank=rank, size=matcher.size, timeout_seconds=timeout_seconds, board=board)
        self.turn = Turn(first_is_main=True)
        self._matcher = matcher
        matcher.register_board(rank, self.board)
        self._is_closed = False

    @property
    def name(self) -> str:
        return "threads"

    @property
    def sees_calls(self) -> bool:
        return True

    def rounds_once(self, device: torch.device) -> bool:
        return True

    def lane(self, purpose: str) -> ThreadsTransport:
        if self.size == 1:
            return self
        name = self.numbered(purpose)
        lane = copy(self)
        lane._matcher = self._result_of(Call("lane", purpose), None, lambda parts: self._matcher.lane(name))
        return lane

    def split(self, color: int | None) -> ThreadsTransport | None:
        transports = self._result_of(Call("split"), (color, self.board), self._split_by)
        return cast("ThreadsTransport | None", transports[self.rank])

    def _result_of(self, call: Call, part: Any, compute: Callable[[list[Any]], Any]) -> Any:
        """Make a collective call, wait for its end, and return its result.

        The last rank that makes the call computes the result: it passes the parts of all ranks to `compute`.
        """
        rendezvous = self._matcher.join(self.rank, call, part, compute)
        return self._matcher.wait(self.rank, rendezvous, self.timeout_seconds)

    def _split_by(self, parts: list[tuple[int | None, Board]]) -> list[ThreadsTransport | None]:
        """Create one group per color, and return each rank's transport in its new group.

        Args:
            parts: the color and the board of each rank, in rank order.

        Returns:
            The transports in rank order. The entry of a rank whose color is None is None.
        """
        transports: list[ThreadsTransport | None] = [None] * self.size
        colors, boards = zip(*parts, strict=True)
        for color in set(colors) - {None}:
            ranks = tuple(rank for rank in range(self.size) if colors[rank] == color)
            matcher = self._matcher.child(ranks)
            members = _transports(matcher, self.timeout_seconds, [boards[rank] for rank in ranks])
            for rank, transport in zip(ranks, members, strict=True):
                transports[rank] = transport
        return transports

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if self.size == 1:
            return torch.zeros(numel, dtype=dtype, device=device)
        call = Call("allocate_shared", "", numel, dtype)
        shared = self._result_of(call, None, lambda parts: torch.zeros(numel, dtype=dtype, device=device))
        return cast(Tensor, shared).view(-1)  # each rank gets a separate view of the same memory

    def abort(self, reason: str, *, traceback: str = "") -> None:
        self._matcher.break_(Failure(PeerFailed, reason, aborted_by=self.rank, traceback=traceback))

    def close(self) -> None:
        if self._matcher.name == MAIN_LANE:
            self._matcher.leave(self.rank, "it closed its transport")
        else:  # this takes no lock, because a garbage collection may close a lane in a thread that holds the lock
            self._is_closed = True

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if self.size == 1:
            return self._done_alone()
        call = Call("all_reduce", op, tensor.numel(), tensor.dtype, terms)
        return self._start(call, _snapshot(tensor), lambda parts: _reduced(parts, op), tensor)

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if self.size == 1:
            return self._done_alone(output, input)
        call = Call("reduce_scatter", op, input.numel(), input.dtype)

        def compute(parts: list[Tensor]) -> list[Tensor]:
            return list(_reduced(parts, op).chunk(len(parts))) if parts[0].numel() else parts

        return self._start(call, _snapshot(input), compute, output)

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if self.size == 1:
            return self._done_alone(output, input)
        call = Call("all_gather", "", input.numel(), input.dtype, terms)
        return self._start(call, _snapshot(input), _concatenated, output)

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if self.size == 1:
            return self._done_alone()
        call = Call("broadcast", f"from rank {src}", tensor.numel(), tensor.dtype)
        if self.rank == src:
            return self._start(call, _snapshot(tensor), lambda parts: parts[src], None)
        return self._start(call, None, lambda parts: parts[src], tensor)

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        call = Call("send", "", tensor.numel(), tensor.dtype)
        return self._start(call, _snapshot(tensor), _only_message, None, (self.rank, dst))

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        call = Call("recv", "", tensor.numel(), tensor.dtype)
        return self._start(call, None, _only_message, tensor, (src, self.rank))

    def _start_barrier(self) -> Work:
        if self.size == 1:
            return self._done_alone()
        return self._start(Call("barrier"), None, lambda parts: None, None)

    def _start(
        self,
        call: Call,
        part: Tensor | None,
        compute: Callable[[list[Any]], Any],
        target: Tensor | None,
        channel: tuple[int, int] | None = None,
    ) -> Work:
        if self._is_closed and self._matcher.failure is None:
            raise closed_error(call, self.rank)
        return _ThreadsWork(self, self._matcher.join(self.rank, call, part, compute, channel), target)

    def _done_alone(self, output: Tensor | None = None, input: Tensor | None = None) -> Work:
        """Do an operation in a group of one rank: copy `input` to `output` unless they are None, and return `DONE`."""
        if self._matcher.failure is not None:
            raise self._matcher.failure.on_rank(self.rank)
        if output is not None and input is not None:
            output.detach().view(-1).copy_(input.detach().view(-1))
        return DONE


# ---------------------------------------------------------------------- arithmetic, in rank order


_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _snapshot(tensor: Tensor) -> Tensor:
    copy = tensor.detach().reshape(-1).clone()
    _synchronize(copy)
    return copy


def _synchronize(tensor: Tensor) -> None:
    """Wait until the current stream of the tensor's device is done, because other threads can use other streams."""
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()


@torch.inference_mode()  # a part may be an inference tensor, which can be written only in this mode
def _reduced(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Reduce the parts in rank order, and return the result. The first part is overwritten."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        _COMBINE[op](total, part.to(total.device, total.dtype), out=total)
    if op == "mean":
        total.div_(len(parts))
    total = total.to(dtype)
    _synchronize(total)
    return total


def _concatenated(parts: list[Tensor]) -> Tensor:
    whole = torch.cat([part.to(parts[0].device) for part in parts])
    _synchronize(whole)
    return whole


def _only_message(parts: list[Tensor | None]) -> Tensor:
    (message,) = [part for part in parts if part is not None]
    return message


# ---------------------------------------------------------------------- ranks as threads


@suggests_arguments
def run_ranks(size: int, fn: Callable[[ThreadsTransport], T], *, timeout_seconds: float = 60.0) -> list[T]:
    """Run `fn(transport)` on `size` ranks, each in its own thread.

    If a rank raises an exception, this function raises the same exception, and the waits of the other ranks raise
    `PeerFailed` with its traceback. If a rank returns while another rank still waits for it, the waiting rank raises
    `UnevenInputs`.

    A rank's backward runs in the rank's own thread on all devices. By default torch has one thread per GPU, which runs
    the backward of every rank: a rank that waits there for another one would wait for ever.

    Args:
        size: number of ranks.
        fn: the function that each rank calls with its transport.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.

    Returns:
        The values that `fn` returned, in rank order.

    Examples:
        >>> def program(transport):
        ...     x = torch.tensor([float(transport.rank)])
        ...     transport.all_reduce(x, "mean").wait()
        ...     return x.item()
        >>> run_ranks(4, program)
        [1.5, 1.5, 1.5, 1.5]
    """
    group = ThreadGroup(size, timeout_seconds)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(group.transport(rank))
        except BaseException as error:
            errors[rank] = error
            text = tracebacks.describe(error).whole
            failure = Failure(PeerFailed, tracebacks.summary(error), aborted_by=rank, traceback=text)
            group._matcher.break_(failure)
        else:
            group._matcher.leave(rank, "its function has returned", with_children=True)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        text = f"the thread that called run_ranks was interrupted: {error!r}"
        group._matcher.break_(Failure(PeerFailed, text))
        raise
    if errors:
        # A PeerFailed only repeats an error that another rank raised first.
        rank = min(errors, key=lambda rank: (isinstance(errors[rank], PeerFailed), rank))
        errors[rank].add_note(f"raised on rank {rank} of {size}")
        raise errors[rank]
    return [results[rank] for rank in range(size)]
