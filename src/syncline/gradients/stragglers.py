"""Stragglers: ranks that are slow over many steps, so that all ranks wait for them in each step.

All ranks receive the same times of all ranks behind the gradients (`step_times.py`). So all ranks find the same
stragglers after the same step, and exchange nothing for it. Only sums over several steps are decoded.

A window of steps has five parts. A rank is slow in a part if it worked `factor` times as long as the median of the
ranks, and `MIN_LATE_SECONDS` a step longer. It becomes a straggler if it is slow in all five parts, and is one until it
is slow in none of them. So one long pause, such as a save or a garbage collection, makes no rank a straggler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from syncline.gradients.step_times import NUM_DIGITS
from syncline.records import PHASES, StragglerRecord

NUM_PARTS = 5

MIN_LATE_SECONDS = 0.005
"""How much longer than the median a slow rank works, in each step. Less is the noise of a busy host."""

_MAX_RECORDS = 100

_PLACES = [256 ** (3 - digit) / 1e6 for digit in range(4)]
"""The value in seconds of each digit of a time."""

Times = tuple[float, ...]
"""The time of a rank in each phase, in seconds a step."""


@dataclass(frozen=True)
class StragglerRule:
    """The conditions under which a rank is a straggler.

    Args:
        factor: a straggler works at least this many times as long as the median of the ranks.
        num_steps: the number of steps over which its times are compared, rounded up to a multiple of five.
        warns: whether rank 0 warns of it.
    """

    factor: float = 2.0
    num_steps: int = 50
    warns: bool = True

    @property
    def steps_per_part(self) -> int:
        return -(-self.num_steps // NUM_PARTS)


class Stragglers:
    """The stragglers among the ranks that average their gradients together."""

    def __init__(self) -> None:
        self.rule = StragglerRule()
        self._steps_per_part = self.rule.steps_per_part  # each step reads it
        self.records: list[StragglerRecord] = []
        """The records of the last 100 stragglers, the oldest first."""
        self._present: dict[int, StragglerRecord] = {}
        self._part: list[Sequence[float]] = []
        """The digits of all ranks in the steps of the part that has not ended."""
        self._parts: deque[tuple[list[Times | None], set[int]]] = deque(maxlen=NUM_PARTS)
        """The mean times of the ranks in the last parts, and the ranks that were slow in them."""

    @property
    def present(self) -> list[StragglerRecord]:
        """The ranks that are slow now, the slowest first."""
        return sorted(self._present.values(), key=lambda one: -one.late_seconds)

    def use(self, rule: StragglerRule) -> None:
        """Apply a rule from now on, and begin a new window. All ranks make this call between the same two steps."""
        self.rule, self._present, self._part = rule, {}, []
        self._steps_per_part = rule.steps_per_part
        self._parts.clear()

    def add(self, digits: Sequence[float], step: int) -> list[StragglerRecord]:
        """Add the times of all ranks in one step, and return the records of the ranks that have just become slow.

        Args:
            digits: the digits of all ranks, in rank order.
            step: the number of the step.
        """
        self._part.append(digits)
        if len(self._part) < self._steps_per_part:
            return []
        times = mean_times(self._part)
        self._parts.append((times, slow_ranks(times, self.rule.factor)))
        self._part = []
        return self._compare(step) if len(self._parts) == NUM_PARTS else []

    def _compare(self, step: int) -> list[StragglerRecord]:
        slow = [ranks for _, ranks in self._parts]
        for rank in self._present.keys() - set().union(*slow):
            ended = self._present.pop(rank)
            self.records = [replace(one, to_step=step) if one is ended else one for one in self.records]
        newly = set.intersection(*slow) - self._present.keys()
        if not newly:
            return []
        num_steps = NUM_PARTS * self.rule.steps_per_part
        window = [_mean(of_rank) for of_rank in zip(*(times for times, _ in self._parts), strict=True)]
        begun = []
        for rank in sorted(newly):
            phase, took, usual, late = _comparison(window, rank)
            record = StragglerRecord(
                rank=rank, phase=phase, phase_seconds=took, usual_seconds=usual, late_seconds=late,
                num_steps=num_steps, from_step=step,
            )  # fmt: skip
            self._present[rank] = record
            begun.append(record)
        self.records = [*self.records, *begun][-_MAX_RECORDS:]
        return begun


def mean_times(steps: Sequence[Sequence[float]]) -> list[Times | None]:
    """Return the mean times of each rank over some steps. They are None for a rank that lacks the times of a step.

    Args:
        steps: the digits of all ranks in each step.
    """
    sums = [sum(column) for column in zip(*steps, strict=True)]
    found: list[Times | None] = []
    for start in range(0, len(sums), NUM_DIGITS):
        if not all(
            any(digits[start : start + 4]) for digits in steps
        ):  # the first time is sent with 1 added to it
            found.append(None)
            continue
        times = []
        for at in range(start, start + NUM_DIGITS, 4):
            total = sum(place * digit for place, digit in zip(_PLACES, sums[at : at + 4], strict=True))
            times.append(max(0.0, total / len(steps) - 1e-6))
        found.append(tuple(times))
    return found


def slow_ranks(times: Sequence[Times | None], factor: float) -> set[int]:
    """Return the ranks that worked `factor` times as long as the median of the ranks, and `MIN_LATE_SECONDS` longer.

    If there are two values in the middle, the smaller one is the median. So ranks are slow only if at least half of the
    ranks are not.

    Args:
        times: the times of each rank; None for a rank that is not compared.
        factor: the factor.

    Examples:
        >>> slow_ranks([(0.0, 0.141, 0.01, 0.02), (0.0, 0.003, 0.01, 0.02), None], 2.0)
        {0}
        >>> slow_ranks([(0.1,), (0.1,), (0.01,)], 2.0)
        set()
    """
    totals = {rank: sum(one) for rank, one in enumerate(times) if one is not None}
    if len(totals) < 2:
        return set()
    usual = median_low(totals.values())
    return {
        rank
        for rank, total in totals.items()
        if total >= factor * usual and total - usual >= MIN_LATE_SECONDS
    }


def _comparison(times: Sequence[Times | None], rank: int) -> tuple[str, float, float, float]:
    """Compare a slow rank with the median of the ranks.

    Returns:
        The phase in which it lost the most time, its time and the usual time in this phase, and how late it was.
    """
    own = times[rank]
    assert own is not None, "a rank is slow only if its times are known"
    known = [one for one in times if one is not None]
    usual = [median_low(one[phase] for one in known) for phase in range(len(own))]
    phase = max(range(len(own)), key=lambda at: own[at] - usual[at])
    late = sum(own) - median_low(sum(one) for one in known)
    return PHASES[phase], own[phase], usual[phase], late


def _mean(parts: Sequence[Times | None]) -> Times | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return tuple(sum(column) / len(known) for column in zip(*known, strict=True))
