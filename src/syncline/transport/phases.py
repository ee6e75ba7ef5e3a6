"""Operations that consist of several phases in sequence, and the queue that drives them.

Nothing runs in the background. Every start, wait or poll in this process drives all operations under way, because a
peer may need the next phase of one operation while this rank waits in another, even on another transport.

Ranks may wait in any order, so the order of phases must not depend on waits. Each phase has a track. The phases of a
track start in the order in which their operations were called. So the calls of an engine that cannot distinguish them
(Gloo) have the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from syncline.errors import SynclineError
from syncline.liveness.calls import Failure
from syncline.transport.c10d_work import C10dWork
from syncline.transport.watched_work import WatchedWork, under_way
from syncline.transport.work import Work

_NAP_SECONDS = 0.0005


class Phase(NamedTuple):
    """One step of an operation."""

    track: str | None
    """The track on which this phase keeps its order; None for a local phase without communication."""
    start: Callable[[], Work | None]
    """Starts the phase. Returns its work, or None if the phase is complete."""


class PhasedWork(WatchedWork):
    """An operation of several phases, begun by `PhaseQueue.add`."""

    __slots__ = ("_num_started", "_phases", "_queue", "current", "is_done")

    def enter(self, queue: PhaseQueue, phases: Iterable[Phase]) -> None:
        """Set the phases of this operation, and the queue that drives it."""
        self._phases = tuple(phases)  # kept until the end, because a backend may use tensors that they hold
        self._num_started = 0
        self._queue = queue
        self.current: Work | None = None
        """The phase under way; None before the first phase, and while earlier operations delay the next one."""
        self.is_done = False

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.is_done:
            self._wait_in_slices(self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def is_completed(self) -> bool:
        if not self.is_done:
            under_way.drive()
        return self.is_done or self._health.failure is not None

    def advance(self, taken: set[str]) -> None:
        """Advance as far as is possible now.

        Args:
            taken: tracks on which earlier operations have phases left. The tracks of this operation's remaining phases
                are added.
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
        to_come = self._phases[self._num_started :]
        taken.update(phase.track for phase in to_come if phase.track is not None)

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
            self._queue.rest(self, remaining_seconds)


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
        """Give up the operations under way, but keep them alive until none of them can still run.

        The thread that drops the last reference to a tensor frees it. A backend's thread that does so while Python
        shuts down aborts the process.
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
        """Return whether no work besides `except_for` needs to be driven."""
        return all(work is except_for for work in list(self._works))

    def drive(self) -> None:
        """Advance as far as is possible now. An error ends the transport, and the waits raise it."""
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

    def rest(self, work: PhasedWork, seconds: float) -> None:
        """Sleep for at most `seconds`, or until a phase that `work` waits for is complete."""
        currents = [work.current, *(other.current for other in self._works)]
        phases = [phase for phase in currents if isinstance(phase, WatchedWork)]
        # The backends of torch have threads of their own; shared memory advances only while a thread waits for it.
        phase = next(
            (phase for phase in phases if not isinstance(phase, C10dWork)), phases[0] if phases else None
        )
        if phase is None:
            time.sleep(min(seconds, _NAP_SECONDS))
            return
        with contextlib.suppress(RuntimeError):  # the next drive of this phase raises the same error
            phase._ends_within(seconds)
