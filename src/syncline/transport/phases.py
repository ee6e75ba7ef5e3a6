"""Operations that consist of several phases in sequence, and the queue that advances them.

No thread advances these operations in the background. Instead, every start, wait or poll in this process advances all
operations under way, because a peer may need the next phase of one operation while this rank waits in another
operation, even on another transport.

Each rank can wait for operations in any order, so the order of phases must not depend on the waits. A track is a named
sequence of phases that start in the order in which their operations were called. So an engine that cannot distinguish
calls (Gloo) gets the phases of a track in the same order on all ranks.

The tensor of an operation can be cut into pieces. Each piece passes through all phases, and different pieces are in
different phases at the same time. On a track, the pieces keep their order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from syncline.errors import SynclineError
from syncline.liveness.at_exit import Keeper
from syncline.liveness.calls import Failure
from syncline.transport.watched import WatchedWork, under_way
from syncline.transport.work import Work

_POLL_SECONDS = 0.0005
"""How long a wait sleeps between two attempts to advance the operations, while no phase is under way."""


class Phase(NamedTuple):
    """One of the steps of which an operation consists."""

    track: str | None
    """The name of the track to which the phase belongs; None for a local phase, which does not communicate."""
    start: Callable[[], Work | None]
    """A function that starts the phase and returns its work. It returns None if the phase is complete already."""


class _Piece:
    """A piece of an operation: its phases, and how far it is."""

    __slots__ = ("_num_started", "_phases", "current")

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._phases = tuple(phases)
        self._num_started = 0
        self.current: Work | None = None
        """The work of the phase under way; None while no phase of this piece is under way."""

    def advance(self, taken: set[str], whole: PhasedWork) -> bool:
        """Advance this piece as far as is possible without waiting, and return whether it is done.

        Args:
            taken: the tracks on which earlier pieces and operations still have to start phases. This piece starts no
                phase on them. This method adds the tracks of the phases that this piece still has to start.
            whole: the operation, by whose call messages describe the phases.
        """
        while True:
            if self.current is not None:
                if not self.current.is_completed():
                    break
                self.current.wait()
                self.current = None
            if self._num_started == len(self._phases):
                return True
            phase = self._phases[self._num_started]
            if phase.track in taken:
                break
            self._num_started += 1
            self.current = phase.start()
            if isinstance(self.current, WatchedWork):
                self.current.describe_as(whole)
        remaining = self._phases[self._num_started :]
        taken.update(phase.track for phase in remaining if phase.track is not None)
        return False


class PhasedWork(WatchedWork):
    """The work of an operation that consists of several phases. `PhaseQueue.add` begins the operation."""

    __slots__ = ("_at_end", "_pieces", "_queue", "_unfinished", "is_done")

    def enter(
        self, queue: PhaseQueue, pieces: Iterable[Iterable[Phase]], at_end: Callable[[], object] | None
    ) -> None:
        """Set the pieces of this operation, the queue that advances them, and a function to call at the end."""
        self._pieces = [
            _Piece(phases) for phases in pieces
        ]  # kept until the end: a backend may use their tensors
        self._unfinished = self._pieces
        self._at_end = at_end
        self._queue = queue
        self.is_done = False

    @property
    def currents(self) -> list[Work]:
        """The works of the phases under way, by piece."""
        return [piece.current for piece in self._unfinished if piece.current is not None]

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.is_done:
            self._wait_in_slices(self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def is_completed(self) -> bool:
        if not self.is_done:
            under_way.drive()
        return self.is_done or self._health.failure is not None

    def advance(self, taken: set[str]) -> None:
        """Advance all pieces of this operation as far as is possible without waiting.

        Args:
            taken: the tracks on which earlier operations still have to start phases. This operation starts no phase on
                them. This method adds the tracks of the phases that this operation still has to start.
        """
        self._unfinished = [piece for piece in self._unfinished if not piece.advance(taken, self)]
        if not self._unfinished:
            if self._at_end is not None:
                self._at_end()
            self.is_done, self._pieces, self._at_end = True, [], None

    def fail(self, error: Exception) -> None:
        """Mark the group as failed, and publish to all ranks that `error` has ended this operation."""
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
    """A queue of the incomplete operations of one lane, in the order of their calls."""

    def __init__(self) -> None:
        self._works: list[PhasedWork] = []

    def add(
        self,
        work: PhasedWork,
        pieces: Sequence[Iterable[Phase]],
        at_end: Callable[[], object] | None = None,
    ) -> None:
        """Begin the operation `work`, and append it to this queue.

        Args:
            work: the operation.
            pieces: the phases of each piece of the operation.
            at_end: a function to call once all pieces are done. Pass None for no function.
        """
        work.enter(self, pieces, at_end)
        with under_way.lock:
            self._works.append(work)
            under_way.add(self)
            self.drive()

    def clear(self) -> None:
        """Remove all operations from this queue, but keep their tensors alive until their timeouts have expired.

        A backend can still use a tensor until then. If a thread of a backend dropped the last reference to a tensor
        while Python shuts down, the process would abort.
        """
        if self._works:
            seconds = max(work.timeout_seconds for work in self._works)
            with contextlib.suppress(RuntimeError):  # Python is ending, and starts no threads
                Keeper(self._works, seconds + 1)
        self._works = []
        under_way.remove(self)

    def is_idle(self, except_for: object) -> bool:
        """Return whether this queue contains no operation besides `except_for`."""
        return all(work is except_for for work in list(self._works))

    def drive(self) -> None:
        """Advance all operations of this queue as far as is possible without waiting.

        If a phase raises an error, or the process is interrupted meanwhile, the transport is marked as failed, and the
        waits raise the error.
        """
        works, taken = self._works, set[str]()
        for work in works:
            try:
                work.advance(taken)
            except Exception as error:
                work.fail(error)
                self.clear()
                return
            except BaseException as interruption:
                # Whether the phase has started is unknown. If it has, a later call would take it for done.
                work.fail(
                    SynclineError(
                        f"{type(interruption).__name__} was raised in this process while it advanced the operation, so "
                        "the operation cannot be completed. Restart the ranks from a checkpoint"
                    )
                )
                self.clear()
                raise
        if self._works is works:
            self._works = [work for work in works if not work.is_done]
        if not self._works:
            under_way.remove(self)

    def sleep(self, work: PhasedWork, seconds: float) -> None:
        """Sleep until a phase under way is complete, but for at most `seconds`.

        The method prefers a phase that does not advance by itself, and after that a phase of `work`.
        """
        currents = [*work.currents, *(phase for other in self._works for phase in other.currents)]
        phases = [phase for phase in currents if isinstance(phase, WatchedWork)]
        if not phases:
            time.sleep(min(seconds, _POLL_SECONDS))
            return
        phases.sort(key=lambda phase: phase.runs_by_itself)  # prefer a phase that advances only during a wait
        with contextlib.suppress(RuntimeError):  # `drive` will raise the same error for this phase
            phases[0]._ends_within(seconds)
