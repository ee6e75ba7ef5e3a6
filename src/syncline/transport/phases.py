"""Operations that consist of several phases in sequence, and the queue that advances them.

No thread advances them in the background. Instead, every start, wait or poll in this process advances all operations
under way. A peer may need the next phase of one operation while this rank waits in another operation, even on another
transport.

Ranks may wait in any order, so the order of phases must not depend on waits. Each phase has a track. The phases of a
track start in the order in which their operations were called. So an engine that cannot distinguish calls (Gloo)
receives them in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from syncline.errors import SynclineError
from syncline.liveness.calls import Failure
from syncline.transport.watched_work import WatchedWork, under_way
from syncline.transport.work import Work

_POLL_SECONDS = 0.0005
"""How long a wait sleeps between two attempts to advance, if there is no phase that it could wait for."""


class Phase(NamedTuple):
    """One step of an operation."""

    track: str | None
    """The track whose phases start in the order of the calls; None for a local phase without communication."""
    start: Callable[[], Work | None]
    """A function that starts the phase and returns its work, or None if the phase is complete."""


class PhasedWork(WatchedWork):
    """An operation of several phases. `PhaseQueue.add` begins the operation."""

    __slots__ = ("_num_started", "_phases", "_queue", "current", "is_done")

    def enter(self, queue: PhaseQueue, phases: Iterable[Phase]) -> None:
        """Set the phases of this operation, and the queue that advances them."""
        self._phases = tuple(phases)  # kept until the end, because a backend may use tensors that they hold
        self._num_started = 0
        self._queue = queue
        self.current: Work | None = None
        """The phase under way; None before the first phase, and while the next phase waits for earlier operations."""
        self.is_done = False

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.is_done:
            self._wait_in_slices(self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def is_completed(self) -> bool:
        if not self.is_done:
            under_way.drive()
        return self.is_done or self._health.failure is not None

    def advance(self, taken: set[str]) -> None:
        """Advance this operation as far as is possible without waiting.

        Args:
            taken: the tracks on which earlier operations have phases left. This method adds the tracks of this
                operation's remaining phases.
        """
        while True:
            if self.current is not None:
                if not self.current.is_completed():
                    break
                self.current.wait()
                self.current = None
            if self._num_started == len(self._phases):
                self.is_done, self._phases = True, ()
                return
            phase = self._phases[self._num_started]
            if phase.track in taken:
                break
            self._num_started += 1
            self.current = phase.start()
            if isinstance(self.current, WatchedWork):
                self.current.describe_as(self)
        remaining = self._phases[self._num_started :]
        taken.update(phase.track for phase in remaining if phase.track is not None)

    def fail(self, error: Exception) -> None:
        """Publish to all ranks that this operation cannot continue."""
        if self._health.failure is None:
            self._health.fail(Failure(SynclineError, f"{self}: {error}"))

    def _has_succeeded(self) -> bool:
        under_way.drive()
        return self.is_done

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            under_way.drive()
            if self.is_done:
                return True
            if self._health.failure is not None:
                raise self._health.error()
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                return False
            self._queue.sleep(self, remaining_seconds)


class PhaseQueue:
    """The incomplete operations of one lane, in the order of their calls."""

    def __init__(self) -> None:
        self._works: list[PhasedWork] = []

    def add(self, work: PhasedWork, phases: Iterable[Phase]) -> None:
        """Start an operation that consists of `phases`."""
        work.enter(self, phases)
        with under_way.lock:
            self._works.append(work)
            under_way.add(self)
            self.drive()

    def clear(self) -> None:
        """Abandon the operations under way, but keep their tensors alive until no operation can still be running.

        The thread that drops the last reference to a tensor frees the tensor. If a thread of a backend frees a tensor
        while Python shuts down, the process aborts.
        """
        if self._works:
            seconds = max(work.timeout_seconds for work in self._works)
            keeper = threading.Timer(seconds + 1, id, args=(self._works,))
            keeper.daemon = True
            with contextlib.suppress(RuntimeError):  # Python is ending, and starts no threads
                keeper.start()
        self._works = []
        under_way.remove(self)

    def is_idle(self, except_for: object) -> bool:
        """Return whether no operation besides `except_for` is under way."""
        return all(work is except_for for work in list(self._works))

    def drive(self) -> None:
        """Advance all operations as far as is possible without waiting.

        An error marks the transport as failed. The waits raise the error.
        """
        works, taken = self._works, set[str]()
        for work in works:
            try:
                work.advance(taken)
            except Exception as error:
                work.fail(error)
                self.clear()
                return
        if self._works is works:
            self._works = [work for work in works if not work.is_done]
        if not self._works:
            under_way.remove(self)

    def sleep(self, work: PhasedWork, seconds: float) -> None:
        """Sleep for at most `seconds`, or until a phase that `work` waits for is complete."""
        currents = [work.current, *(other.current for other in self._works)]
        phases = [phase for phase in currents if isinstance(phase, WatchedWork)]
        if not phases:
            time.sleep(min(seconds, _POLL_SECONDS))
            return
        phases.sort(key=lambda phase: phase.runs_by_itself)  # first a phase that advances only during a wait
        with contextlib.suppress(RuntimeError):  # `drive` will raise the same error for this phase
            phases[0]._ends_within(seconds)
