"""The works of torch.distributed process groups: how to wait for an operation, and which errors the wait raises.

For CPU tensors, `wait` blocks, and checks for failures from time to time (see `watched.py`). Gloo sends copies of
GPU tensors on the CPU. For GPU tensors over NCCL, `wait` only makes the current stream wait for the operation, as in
torch. If the caller passes no timeout, errors then come from NCCL's own watchdog.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from syncline._torch.autograd import call_without_context
from syncline.errors import SynclineError
from syncline.liveness.at_exit import AT_EXIT
from syncline.liveness.board import Wait
from syncline.liveness.calls import TorchCall
from syncline.liveness.failed_wait import FailedWait, is_of_backend
from syncline.transport.watched import SLICE_SECONDS, WatchedTransport, WatchedWork

_SLICE = timedelta(seconds=SLICE_SECONDS)

_LOOK_SECONDS = 0.008
"""The time between two looks at the processes of the other ranks on this host, while a rank waits.

A connection closes only 25 ms after the end of a process has begun. And Gloo notices it only on ranks that wait for
this very process: others wait for ranks that have noticed it, and send nothing any more.
"""

_LOOK_SECONDS_PER_RANK = 0.001
"""The time to add to `_LOOK_SECONDS` for each rank of the group, because a check reads a file for each process."""

_MAX_LOOK_SECONDS = 0.02

_LOOK_AGAIN_SECONDS = 0.004
"""The time between two looks after a process has ended."""

_ARRIVAL_SECONDS = 0.012
"""How long a rank still waits when a process has ended, because what this process sent before may be on the way.

On a busy machine this may be too short. Then the operation fails here, although it may succeed on other ranks, as it
may with any other failure.
"""


class C10dWork(WatchedWork):
    """The work of one operation of a process group. Call its method `start` to begin the operation."""

    __slots__ = ("_finish", "_work")

    runs_by_itself = True

    def start(self, start: Callable[[], Any], finish: Callable[[], object] | None) -> None:
        """Begin the operation, without the Python state that autograd attaches to the thread during a backward.

        The work that a backend returns keeps the state of the calling thread. During a backward, this state contains a
        Python object. If a thread of the backend drops the last reference to this object while Python shuts down, the
        process aborts ("terminate called without an active exception"). So the object is removed for the call.

        Args:
            start: a function that calls the backend and returns the backend's work.
            finish: a function that `wait` calls once the operation is done. Pass None for no function.
        """
        self._finish = finish
        self._work: Any = None
        self._work = call_without_context(start)

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._work is None:
            return
        try:
            device = self._lane.barrier_device if self._tensor is None else self._tensor.device.type
            if device == "cpu":
                self._wait_in_slices(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            elif timeout_seconds is None:
                AT_EXIT.wait_in_torch(self._work.wait)
            else:
                AT_EXIT.wait_in_torch(self._work.wait, _at_least_a_millisecond(timeout_seconds))
        except SynclineError:
            raise
        except RuntimeError as error:
            # The text contains the backend's message. Its traceback is one line of torch and would only hide the
            # user's own traceback. A debugger finds the error in `__context__`.
            raise FailedWait(self._health, self).broken_by(error) from None
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None

    def is_completed(self) -> bool:
        # Callers that only poll must see a failure, too: after an abort by a peer, a message from it never arrives.
        return self._work is None or self._work.is_completed() or self._health.failure is not None

    def _has_succeeded(self) -> bool:
        # A backend has threads of its own: data that a peer sent before it failed may still arrive.
        work = self._work
        try:
            if work is not None:
                AT_EXIT.wait_in_torch(work.wait, _SLICE)
        except RuntimeError:
            return False
        return True

    def _ends_within(self, seconds: float) -> bool:
        health, work = self._health, self._work
        if work is None:  # another thread has waited for it
            return True
        if health.failure is not None and not self._has_succeeded():
            raise health.error()
        pause_seconds = min(_LOOK_SECONDS + _LOOK_SECONDS_PER_RANK * health.size, _MAX_LOOK_SECONDS)
        while True:
            pause_seconds = min(pause_seconds, seconds)
            try:
                AT_EXIT.wait_in_torch(work.wait, _at_least_a_millisecond(pause_seconds))
                return True
            except RuntimeError:
                pass
            if work.is_completed():
                work.wait()  # returns if the work ended just now, else raises its error again
                return True
            seconds -= pause_seconds
            if seconds <= 0:
                return False
            killed = health.killed_ranks()
            if killed and not work.is_completed():
                if max(killed.values()) >= _ARRIVAL_SECONDS:
                    raise FailedWait(health, self).lost(sorted(killed))
                pause_seconds = _LOOK_AGAIN_SECONDS


class CallOfTorch(C10dWork):
    """The work of a collective that torch itself started on a process group.

    Its `wait` raises the same errors as the waits for operations of Syncline.

    Args:
        transport: a transport between the ranks of the process group.
        group: the process group on which torch started the collective.
        name: the name of the collective in messages.
        work: the work that torch returned. Pass None if torch itself waits for the collective.
    """

    __slots__ = ("_call",)

    def __init__(
        self, transport: WatchedTransport, group: dist.ProcessGroup, name: str, work: Any = None
    ) -> None:
        super().__init__(transport, name, "", None)
        self._finish = None
        self._work = work
        self._call = TorchCall.latest(group, name)

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        if self._call is None:
            return super().as_wait(number=number, blocks_rank=blocks_rank)
        return replace(self._call.as_wait(blocks_rank=blocks_rank), number=number)

    def named(self, error: RuntimeError) -> RuntimeError:
        """Convert an error of the backend to an error of Syncline, and return it. Return other errors unchanged."""
        if isinstance(error, SynclineError) or not is_of_backend(error):
            return error
        return FailedWait(self._health, self).broken_by(error)


def _at_least_a_millisecond(seconds: float) -> timedelta:
    """Return a duration of `seconds`, but of at least 1 ms.

    Torch rounds a timeout down to whole milliseconds, and treats a timeout of 0 as no limit.
    """
    return timedelta(seconds=max(seconds, 0.001))


class MessageWork:
    """The work of a `send` or `recv` of a CPU tensor, which is waited for on a separate thread.

    Gloo completes a message only while a thread waits for it. If that wait times out, Gloo closes all its connections.
    So a separate thread waits with a long timeout. The calling thread waits for that thread in short slices, and checks
    for failures in between.

    Args:
        work: the work that Gloo returned for the message.
        timeout_seconds: how long the separate thread waits for `work`.
    """

    def __init__(self, work: Any, timeout_seconds: float) -> None:
        self._work = work
        self._timeout = timedelta(seconds=timeout_seconds)
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline message", daemon=True)
        self._thread.start()
        AT_EXIT.stop(self)

    def stop(self, seconds: float) -> None:
        """Wait for the thread, at most for so many seconds. (Torch has no function that ends its wait.)"""
        self._thread.join(seconds)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the message is complete.

        Raises:
            RuntimeError: the message failed, or the timeout expired. Works of torch raise this class, too.
        """
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the message was not sent or received within the timeout of the wait")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether the message is complete or has failed. (Gloo's own `is_completed` is not reliable here.)"""
        return self._ended.is_set()

    def _run(self) -> None:
        try:
            self._work.wait(self._timeout)
        except Exception as error:
            self._error = error
        self._ended.set()
