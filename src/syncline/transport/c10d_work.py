"""An operation of a torch.distributed process group: how it is waited for, and its errors in our words.

A `wait` on the CPU looks up from time to time (see `watched_work`). On a GPU `wait` orders the current stream after
the operation, as torch does, and errors come from the backend's own watchdog, unless a timeout is given.
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
from syncline.liveness.board import Wait
from syncline.liveness.health import is_of_backend
from syncline.liveness.torch_calls import TorchCall
from syncline.transport.watched_work import SLICE_SECONDS, Watched, WatchedWork

__all__ = ["C10dWork", "CallOfTorch", "MessageWork"]


_SLICE = timedelta(seconds=SLICE_SECONDS)


class C10dWork(WatchedWork):
    """One operation, under way once `start` was called."""

    __slots__ = ("_finish", "_work")

    def start(self, start: Callable[[], Any], finish: Callable[[], object] | None) -> None:
        """Call the backend by `start`; `finish` is what is left to do when it is done.

        A backend's work remembers the thread's state at the call. During a backward torch keeps a Python object
        there, and whoever drops the last reference to it needs the interpreter: a thread of the backend that does
        so while Python shuts down aborts the process ("terminate called without an active exception"), long after
        the work is done. So the object stays out of the work.
        """
        self._finish = finish
        self._work: Any = None
        self._work = call_without_context(start)

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

    def _has_succeeded(self) -> bool:
        # A backend has threads of its own: what a peer sent before it failed may still be on its way.
        work = self._work
        try:
            if work is not None:
                work.wait(_SLICE)
        except RuntimeError:
            return False
        return True

    def _ends_within(self, seconds: float) -> bool:
        health, work = self._health, self._work
        if work is None:  # another thread has waited for it
            return True
        if health.failure is not None and not self._has_succeeded():
            raise health.error()
        try:
            work.wait(_SLICE if seconds == SLICE_SECONDS else _at_least_a_millisecond(seconds))
            return True
        except RuntimeError:
            pass
        if work.is_completed():
            work.wait()  # it ended just now, or says once more what went wrong
            return True
        return False


class CallOfTorch(C10dWork):
    """A collective that torch itself started on a process group. Waiting for it raises the same errors as for ours.

    Args:
        transport: over the same ranks.
        group: torch's.
        name: of the call, for messages.
        work: what torch gave; None where it waits itself.
    """

    __slots__ = ("_call",)

    def __init__(self, transport: Watched, group: dist.ProcessGroup, name: str, work: Any = None) -> None:
        super().__init__(transport, name, "", None)
        self._finish = None
        self._work = work
        self._call = TorchCall.latest(group, name)

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        if self._call is None:
            return super().as_wait(number=number, blocks_rank=blocks_rank)
        return replace(self._call.as_wait(blocks_rank=blocks_rank), number=number)

    def named(self, error: RuntimeError) -> RuntimeError:
        """What the backend raised in it, in our words; any other error as it is."""
        if isinstance(error, SynclineError) or not is_of_backend(error):
            return error
        return self._health.broken_by(error, self)


def _at_least_a_millisecond(seconds: float) -> timedelta:
    """For torch rounds down to those, and takes 0 as no limit."""
    return timedelta(seconds=max(seconds, 0.001))


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
