"""An operation of a torch.distributed process group: how it is waited for, and its errors in our words.

A `wait` on the CPU looks up every `_SLICE_SECONDS` whether a peer has told of an error (see `notices`). On a
GPU `wait` orders the current stream after the operation, as torch does, and errors come from the backend's
own watchdog, unless a timeout is given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import _C, Tensor

from syncline.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, SynclineError
from syncline.transport.base import Work
from syncline.transport.calls import Call, Failure
from syncline.transport.notices import Notices

__all__ = ["C10dWork", "Health", "Lane", "MessageWork"]

_CONTEXT = "context"
"""Where torch 2.12 and later keep the caller's contextvars while a backward runs."""
_CAN_REMOVE_CONTEXT = hasattr(_C, "_remove_obj_from_tls")
_SLICE_SECONDS = 0.25
_SLICE = timedelta(seconds=_SLICE_SECONDS)


class Health:
    """Whether a group can still be used on this rank, and why not.

    Args:
        group: the process group.
        notices: where ranks tell each other; None for a rank that is alone.
        rank: this rank in the group.
        size: number of ranks in the group.
        backend: the backend's name, for messages.
        timeout_seconds: how long an operation of the group can be under way.
        barrier_device: the type of device on which a barrier runs.
    """

    def __init__(
        self,
        group: object,
        notices: Notices | None,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout_seconds: float,
        barrier_device: str,
    ) -> None:
        self.failure: Failure | None = None
        self.rank = rank
        self.barrier_device = barrier_device
        self._size = size
        self._backend = backend
        self._notices = notices
        self._groups = [group]
        self._timeout_seconds = timeout_seconds

    def fail(self, failure: Failure) -> None:
        """The end of the transport; the peers are told."""
        if self.failure is None:
            self.failure = failure
            self._keep_groups()
            if self._notices is not None:
                self._notices.publish(failure)

    def keep(self, group: object) -> None:
        """A lane's group is one more that operations can be under way in."""
        self._groups.append(group)

    def let_go(self, group: object) -> None:
        """A lane was closed."""
        if group in self._groups:
            self._groups.remove(group)

    def close(self) -> None:
        """Nothing more is started, and the groups are let go."""
        if self.failure is None:
            self.failure = self.closed()
        self._groups = []

    def closed(self) -> Failure:
        """What is said of a lane, or of the transport, that was closed."""
        return Failure(SynclineError, _CLOSED)

    def look_around(self) -> None:
        """Raise if a peer has told of the end of the transport."""
        told = None if self._notices is None else self._notices.failure()
        if told is not None:
            raise self._told(told)

    def _told(self, failure: Failure) -> SynclineError:
        if self.failure is None:
            self.failure = failure
            self._keep_groups()
        return self.failure.on_rank(self.rank)

    def _keep_groups(self) -> None:
        """Keep the process groups until no operation can be under way any more.

        When its last user goes, a Gloo group waits for its operations: a process that has given up would not
        end before they time out.
        """
        keeper = threading.Timer(self._timeout_seconds + 1, id, args=(list(self._groups),))
        keeper.daemon = True
        keeper.start()

    def waits_in(self, work: C10dWork) -> None:
        """Let the peers know that this rank has been waiting for a while."""
        if self._notices is not None:
            self._notices.waits_in(str(work))

    def timed_out(self, work: C10dWork) -> SynclineError:
        """Nobody failed, but not every rank came."""
        return self._ended(work, CollectiveTimeout, "not every rank came before the deadline", _LATE, None)

    def broken_by(self, error: RuntimeError, work: C10dWork) -> SynclineError:
        """The backend's error in our words."""
        kind, what, remedy = _meaning(str(error))
        told = None if self._notices is None else self._notices.failure()
        if told is not None and (told.kind is PeerFailed or (kind is PeerLost and told.kind is not PeerLost)):
            # A lost connection is only the consequence of what the peer itself has told.
            return self._told(told)
        return self._ended(work, kind, what, remedy, error)

    def _ended(
        self, work: C10dWork, kind: type[SynclineError], what: str, remedy: str, error: Exception | None
    ) -> SynclineError:
        where = f"rank {self.rank} of {self._size} over {self._backend}"
        lines = [f"{work} on {where}: {what}, {work.elapsed_seconds():.1f} s after the call"]
        if kind is CollectiveTimeout and self._notices is not None:
            lines.append(self._notices.places())
        lines.append(remedy)
        if error is not None:
            lines.append(f"{self._backend} said: {_without_cpp_frames(str(error))}")
        failure = Failure(kind, "\n".join(lines))
        self.fail(failure)
        return failure.on_rank(self.rank)


_CLOSED = (
    "this transport was closed, by shutdown(), by its own close(), or because its process group was destroyed: "
    "nothing can be sent any more. Wrap the module again after the next init(), or shut down later"
)
_LATE = (
    "look at what the ranks do that do not wait here (an endless loop, fewer batches, another call); "
    "if they are only slow, raise the timeout"
)
_LOST = (
    "a peer's process has ended, or its network failed: look at the log of the rank that ended first, "
    "its last lines say why"
)
_DIFFERENT = "every rank must make the same calls in the same order, with equal sizes and dtypes"
_SIGNS_OF_LOSS = ("connect", "broken pipe", "socket", "peer", "pair closure")


def _without_cpp_frames(message: str) -> str:
    """A backend's words (NCCL's reason is on the second line), without torch's own C++ stack below them."""
    return message.partition("\nException raised from ")[0].rstrip()


def _meaning(message: str) -> tuple[type[SynclineError], str, str]:
    """What a backend's error message stands for: our error, what happened, what to do."""
    words = message.lower()
    if "enforce fail" in words or "mismatch" in words:
        return CollectiveMismatch, "the ranks called different operations, or sizes differ", _DIFFERENT
    if "timed out" in words or "timeout" in words:
        return CollectiveTimeout, "not every rank came before the deadline", _LATE
    if any(sign in words for sign in _SIGNS_OF_LOSS):
        return PeerLost, "the connection to a peer is lost", _LOST
    return SynclineError, "the backend failed", "its own words, below, are all that is known"


class Lane:
    """One kind of talk of a transport; its collectives are numbered, the same on every rank."""

    __slots__ = ("name", "num_started")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_started = 0


class C10dWork(Work):
    """One operation, under way once `start` was called.

    Args:
        health: of the transport.
        lane: that it was called on.
        timeout_seconds: of the transport.
        operation: its name, for messages.
        detail: reduce operation or peer, for messages.
        tensor: what the caller handed in; None for a barrier.
        finish: what is left to do when the backend is done.
    """

    __slots__ = (
        "_detail",
        "_finish",
        "_health",
        "_lane",
        "_number",
        "_operation",
        "_started",
        "_tensor",
        "_timeout_seconds",
        "_work",
    )

    def __init__(
        self,
        health: Health,
        lane: Lane,
        timeout_seconds: float,
        operation: str,
        detail: str,
        tensor: Tensor | None,
        finish: Callable[[], object] | None,
    ) -> None:
        self._health = health
        self._lane = lane
        self._timeout_seconds = timeout_seconds
        self._operation = operation
        self._detail = detail
        self._tensor = tensor
        self._finish = finish
        self._number = lane.num_started
        self._started = time.monotonic()
        self._work: Any = None

    def start(self, start: Callable[[], Any]) -> None:
        """Call the backend.

        A backend's work remembers the thread's state at the call. During a backward torch keeps a Python object
        there, and whoever drops the last reference to it needs the interpreter: a thread of the backend that does
        so while Python shuts down aborts the process ("terminate called without an active exception"), long after
        the work is done. So the object stays out of the work.
        """
        if not _thread_holds_context():
            self._work = start()
            return
        context = _C._get_obj_in_tls(_CONTEXT)
        _C._remove_obj_from_tls(_CONTEXT)
        try:
            self._work = start()
        finally:
            _C._stash_obj_in_tls(_CONTEXT, context)

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._work is None:
            return
        try:
            device = self._health.barrier_device if self._tensor is None else self._tensor.device.type
            if device == "cpu":
                self._wait_in_slices(self._timeout_seconds if timeout_seconds is None else timeout_seconds)
            elif timeout_seconds is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=max(timeout_seconds, 0.001)))
        except SynclineError:
            raise
        except RuntimeError as error:
            # All that the backend said is in the text: its own traceback, one line of torch, would only be in the
            # way of the user's. A debugger finds the error in `__context__`.
            raise self._health.broken_by(error, self) from None
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def elapsed_seconds(self) -> float:
        """Time since the call."""
        return time.monotonic() - self._started

    def __str__(self) -> str:
        tensor = self._tensor
        numel, dtype = (None, None) if tensor is None else (tensor.numel(), tensor.dtype)
        call = Call(self._operation, self._detail, numel, dtype)
        return f"{call} (call {self._number} on the {self._lane.name} lane)"

    def _wait_in_slices(self, timeout_seconds: float) -> None:
        health, work = self._health, self._work
        deadline = time.monotonic() + timeout_seconds
        slice_ = _SLICE if timeout_seconds >= _SLICE_SECONDS else _at_most(timeout_seconds)
        has_told = False
        while health.failure is None or work.is_completed():
            try:
                work.wait(slice_)
                return
            except RuntimeError:
                pass
            if work.is_completed():
                work.wait()  # it ended just now, or says once more what went wrong
                return
            if not has_told:
                health.waits_in(self)
                has_told = True
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise health.timed_out(self)
            health.look_around()
            slice_ = _at_most(remaining_seconds)
        raise health.failure.on_rank(health.rank)


def _thread_holds_context() -> bool:
    return _CAN_REMOVE_CONTEXT and _C._is_key_in_tls(_CONTEXT)


def _at_most(seconds: float) -> timedelta:
    """A slice; at least a millisecond, for torch rounds down to those and takes 0 as no limit."""
    return timedelta(seconds=min(max(seconds, 0.001), _SLICE_SECONDS))


class MessageWork:
    """A message on the CPU, waited for by a thread of its own.

    Gloo ends all its connections when the wait for a message times out, and a message does not complete
    unless somebody waits for it. A thread that waits for as long as the transport allows leaves us free to
    look, and to give up.

    Args:
        work: the backend's work.
        timeout_seconds: how long the thread waits.
    """

    def __init__(self, work: Any, timeout_seconds: float) -> None:
        self._work = work
        self._timeout = timedelta(seconds=timeout_seconds)
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="syncline message", daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> None:
        """As a torch work's."""
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """As a torch work's, but true."""
        return self._ended.is_set()

    def _run(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            self._error = error
        self._ended.set()
