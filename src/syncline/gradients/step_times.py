"""The times of a step on each rank, from which follows which rank the others waited for.

All ranks leave a synchronized backward at about the same time. So the time that a rank then works until it has sent its
next gradients says how late it is, and no clocks have to be compared. Each rank measures its own work: time in which it
waits for other ranks does not count. Its times travel in the tail of the last bucket (`tail.py`) as a note: nothing is
decided by them in the step, so they are decoded only when a record is read, or as sums over many steps (stragglers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.records import RankTimes, StepTiming
from syncline.transport.base import Transport

NUM_DIGITS = 16
"""The number of base-256 digits of a rank's times: four times in microseconds, of four digits each."""

_MOST = 256**4 - 1
"""The largest time that fits, 71 minutes in microseconds. It stands for all longer times."""

DATA, FORWARD, BACKWARD = range(3)
"""The phases of a step. A phase lasts until the next one begins."""


class StepClock:
    """A clock that measures the phases of this rank's steps. A step lasts from one synchronized backward to the next.

    Args:
        transport: the transport whose waits do not count.
        now: the clock, in seconds.

    Examples:
        >>> from syncline.transport.threads import ThreadGroup
        >>> times = iter([0.0, 3.0, 5.0, 9.0])  # seconds
        >>> clock = StepClock(ThreadGroup(1).transport(0), now=times.__next__)
        >>> clock.end_step()
        >>> clock.enter(FORWARD)
        >>> clock.enter(BACKWARD)
        >>> decoded(clock.note())[0].data_seconds
        3.0
    """

    def __init__(self, transport: Transport, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.heard: Sequence[float] = ()
        """The notes of all ranks, as they were received in the present step."""
        self._counts = transport.counts
        self._seconds = [0.0, 0.0, 0.0]
        """The time of this rank's work in each phase of the present step."""
        self._update_seconds = 0.0
        self._phase = DATA
        self._since = 0.0
        """The working time at which the present phase began: the time of the clock without this rank's waits."""
        self._began: tuple[float, float] | None = None
        """The time at which the present step began, and how long this rank had waited until then. None before the end
        of the first synchronized backward."""

    def enter(self, phase: int) -> None:
        """End the present phase, and begin another one."""
        working = self.now() - self._counts.waited_seconds
        self._seconds[self._phase] += working - self._since
        if phase is BACKWARD and not self._seconds[FORWARD]:
            # The second backward after one forward: the time between the backwards computed another loss.
            self._seconds[FORWARD], self._seconds[DATA] = self._seconds[DATA], 0.0
        self._since, self._phase = working, phase

    def optimizer_stepped(self) -> None:
        """Record that an attached optimizer has stepped. The time since the last backward belongs to this update."""
        self.enter(DATA)
        self._update_seconds += self._seconds[DATA]
        self._seconds[DATA] = 0.0

    def note(self) -> bytes:
        """Return the times of the present step up to now, to be sent. They are empty in the first step."""
        if self._began is None:
            return b""
        present = self.now() - self._counts.waited_seconds - self._since
        times = [self._update_seconds, *self._seconds]
        times[1 + self._phase] += present
        # A time can be negative if another thread has waited for other ranks while this thread worked.
        return encoded(times)

    def end_step(self) -> Measured | None:
        """End the present step and begin the next, because a synchronized backward has ended.

        Returns:
            The times of the step that has ended; None if it was the first step, whose beginning is unknown.
        """
        now, waited = self.now(), self._counts.waited_seconds
        ended = None
        if self._began is not None:
            ended = Measured(now - self._began[0], waited - self._began[1], self.heard)
        self._began, self.heard = (now, waited), ()
        self._since, self._phase = now - waited, DATA
        self._seconds, self._update_seconds = [0.0, 0.0, 0.0], 0.0
        return ended


class Measured(NamedTuple):
    """The times of a step that has ended, as they were measured and received. `record` makes them readable."""

    step_seconds: float
    waited_seconds: float
    notes: Sequence[float]
    """The digits of the times of all ranks."""

    def record(self) -> StepTiming:
        """Return the record of these times."""
        of_ranks = decoded(self.notes)
        return StepTiming(
            step_seconds=self.step_seconds, waited_seconds=self.waited_seconds, of_ranks=of_ranks
        )


def encoded(times: Sequence[float]) -> bytes:
    """Return the digits of the times of one rank, in seconds: update, data, forward and backward.

    1 is added to each time, because a rank without times sends zeros.
    """
    return b"".join(min(_MOST, 1 + max(0, int(1e6 * each))).to_bytes(4, "big") for each in times)


def decoded(notes: Sequence[float]) -> tuple[RankTimes | None, ...]:
    """Return the times of each rank, in rank order. They are None for a rank that has sent none.

    Args:
        notes: the digits of all ranks, in rank order.
    """
    times: list[RankTimes | None] = []
    for start in range(0, len(notes), NUM_DIGITS):
        digits = [int(digit) for digit in notes[start : start + NUM_DIGITS]]
        micros = [int.from_bytes(bytes(digits[at : at + 4]), "big") for at in range(0, NUM_DIGITS, 4)]
        update, data, forward, backward = (max(0, each - 1) / 1e6 for each in micros)
        times.append(
            RankTimes(
                update_seconds=update,
                data_seconds=data,
                forward_seconds=forward,
                backward_seconds=backward,
            )
            if any(micros)
            else None
        )
    return tuple(times)
