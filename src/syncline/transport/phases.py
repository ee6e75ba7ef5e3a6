"""Operations that consist of several, one after the other: how they are driven on.

Nothing runs in the background. Whoever starts an operation, waits or polls in this process drives on all that is under
way: a peer may need the next phase of one operation while this rank waits in another, on whatever transport.

Ranks may wait in any order, so the order of phases must not depend on it. Each phase has a track, and phases start on
a track in the order in which their operations were called: the calls of an engine that cannot tell one from the other
(Gloo) are in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from syncline.errors import SynclineError
from syncline.liveness.calls import Failure
from syncline.transport.base import Work
from syncline.transport.c10d_work import C10dWork
from syncline.transport.watched_work import WatchedWork, under_way

__all__ = ["Phase", "PhaseQueue", "PhasedWork"]


_NAP_SECONDS = 0.0005


class Phase(NamedTuple):
    """One step of an operation."""

    track: str | None
    """Where order counts; None for what concerns nobody else."""
    start: Callable[[], Work | None]
    """Begins it; None if that was all."""


class PhasedWork(WatchedWork):
    """An operation of several phases, begun by `PhaseQueue.add`."""

    __slots__ = ("_num_started", "_phases", "_queue", "current", "is_done")

    def enter(self, queue: PhaseQueue, phases: Iterable[Phase]) -> None:
        """Be driven on by `queue`, through `phases`."""
        self._phases = tuple(phases)  # kept to the end: a backend may use what they hold
        self._num_started = 0
        self._queue = queue
        self.current: Work | None = None
        """The phase under way; None before the first, and between two while other operations go first."""
        self.is_done = False

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.is_done:
            self._wait_in_slices(self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def is_completed(self) -> bool:
        if not self.is_done:
            under_way.drive()
        return self.is_done or self._health.failure is not None

    def advance(self, taken: set[str]) -> None:
        """Go as far as is possible now.

        Args:
            taken: tracks on which earlier operations have phases to come; this one's are added.
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
                self.current.speak_as(self)
        to_come = self._phases[self._num_started :]
        taken.update(phase.track for phase in to_come if phase.track is not None)

    def fail(self, error: Exception) -> None:
        """See that all ranks know that this cannot go on."""
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
    """The operations of one lane that are not done, in the order in which they were called."""

    def __init__(self) -> None:
        self._works: list[PhasedWork] = []

    def add(self, work: PhasedWork, phases: Iterable[Phase]) -> None:
        """Begin an operation, which consists of `phases`."""
        work.enter(self, phases)
        with under_way.lock:
            self._works.append(work)
            under_way.add(self)
            self.drive()

    def clear(self) -> None:
        """Give up what is under way, but keep it until it cannot be any more.

        Who lets go of a tensor last frees it. A backend's thread that does so while Python ends aborts the process.
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
        """Whether nothing but one work needs to be driven on."""
        return all(work is except_for for work in list(self._works))

    def drive(self) -> None:
        """Go as far as is possible now; errors end the transport, and are raised by whoever waits."""
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
        """Sleep for at most so long, or until something has happened that `work` waits for."""
        currents = [work.current, *(other.current for other in self._works)]
        phases = [phase for phase in currents if isinstance(phase, WatchedWork)]
        # The backends of torch have threads of their own; shared memory goes on only while it is waited for.
        phase = next(
            (phase for phase in phases if not isinstance(phase, C10dWork)), phases[0] if phases else None
        )
        if phase is None:
            time.sleep(min(seconds, _NAP_SECONDS))
            return
        with contextlib.suppress(RuntimeError):  # whatever it is, the next one to drive the phase on meets it
            phase._ends_within(seconds)
