"""One run, as the report sees it: the steps of all ranks, on one clock (pure functions).

[Note: clocks]

Processes of one host read the same clock. The clocks of two hosts differ by an unknown offset. No messages are needed
to find it: a rank can have the result of a bucket only after each other rank has sent its part. So each bucket bounds
the offset from both sides, and the tightest bounds of many steps leave an interval as long as one round trip of a
message. Clocks drift apart by some microseconds a second, so the offset is found anew in each window of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from syncline.tools.report.load import ProcessTrace, R
from syncline.tools.report.steps import RankStep, main_module, steps_of
from syncline.tracing import rows

WINDOW_STEPS = 200
"""The number of steps for which an offset is assumed to be constant."""


class Meeting(NamedTuple):
    """One operation in which a process took part, together with all others."""

    step: int
    began: int
    """When the process sent its part."""
    ended: int
    """When the process had the result."""


class Offset(NamedTuple):
    """The number that converts times of a clock to times of the first clock, in the steps from `from_step` on."""

    from_step: int
    offset: int
    error: int
    """The offset is certain up to this number of microseconds."""


class Clock(NamedTuple):
    """The offsets of one clock."""

    offsets: Sequence[Offset]

    def at(self, step: int) -> int:
        """Return the offset to add to times in this step."""
        if not self.offsets:
            return 0
        index = bisect_right(self.offsets, step, key=lambda one: one.from_step) - 1
        return self.offsets[max(0, index)].offset

    @property
    def error(self) -> int:
        """The largest error of the offsets, in microseconds."""
        return max((one.error for one in self.offsets), default=0)


Meetings = Mapping[tuple[object, ...], Meeting]
"""Operations by a key that is the same in all processes."""


def compared(first: Meetings, other: Meetings) -> Clock | None:
    """Return the offsets of a clock. None if the two processes have never met.

    Args:
        first: the meetings of a process that reads the first clock, by key.
        other: the meetings of a process that reads the other clock.

    Examples:
        >>> first = {(1,): Meeting(1, 100, 130), (2,): Meeting(2, 200, 220)}
        >>> other = {(1,): Meeting(1, 1105, 1125), (2,): Meeting(2, 1190, 1225)}
        >>> compared(first, other)
        Clock(offsets=[Offset(from_step=1, offset=-1000, error=25)])
    """
    windows: dict[int, list[int]] = {}
    for key in first.keys() & other.keys():
        one, two = first[key], other[key]
        bounds = windows.setdefault(one.step // WINDOW_STEPS, [-(1 << 62), 1 << 62, one.step])
        # two.ended + offset >= one.began, and one.ended >= two.began + offset
        bounds[0] = max(bounds[0], one.began - two.ended)
        bounds[1] = min(bounds[1], one.ended - two.began)
        bounds[2] = min(bounds[2], one.step)
    if not windows:
        return None
    return Clock(
        [
            Offset(step, (low + high) // 2, abs(high - low) // 2)
            for _, (low, high, step) in sorted(windows.items())
        ]
    )


_SYSTEM_ERROR = 20_000
"""The largest assumed difference between the system clocks of two hosts, in microseconds."""

_RESTART_SECONDS = 1.0
"""The least time between two lives of a job: in a restart, processes start and import torch."""

_WARM_UP_STEPS = 3
"""The number of first steps to leave out. They are slower, because they allocate memory and lay out buckets again."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The steps of all ranks."""

    module: str | None
    """The wrapped module that defines the steps; None if no step was recorded."""
    processes: Sequence[ProcessTrace]
    steps: Mapping[int, Mapping[int, RankStep]]
    """The steps of each rank, by the number of the step and by rank."""
    clock_error: int
    """The largest error of a comparison of times of different hosts, in microseconds; 0 on one host."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks at the end of the run."""
        at_first = max((one.process.num_ranks for one in self.processes), default=0)
        return self.changes[-1].num_ranks if self.changes else at_first

    @cached_property
    def changes(self) -> list[rows.RanksRow]:
        """The changes of the ranks, each once, in the order of steps."""
        found = {(row.step, row.num_ranks): row for row in reversed(self.rows_of(rows.RanksRow))}
        return [found[key] for key in sorted(found)]

    @cached_property
    def discarded(self) -> list[int]:
        """The steps that were discarded."""
        return [
            number for number, ranks in self.steps.items() if any(one.is_discarded for one in ranks.values())
        ]

    @cached_property
    def steady(self) -> list[int]:
        """The steps from which figures are computed: complete, after the first ones, and not discarded."""
        most = max(map(len, self.steps.values()), default=0)
        discarded = set(self.discarded)
        complete = [
            number for number, ranks in self.steps.items() if len(ranks) == most and number not in discarded
        ]
        later = [number for number in complete if number > _WARM_UP_STEPS]
        return later or complete

    def length(self, number: int) -> int:
        """Return the length of a step, in microseconds: the mean of the ranks."""
        return round(fmean(one.length for one in self.steps[number].values()))

    @property
    def steps_of_ranks(self) -> Iterator[RankStep]:
        """All steps of all ranks."""
        return (step for ranks in self.steps.values() for step in ranks.values())

    def rows_of(self, kind: type[R]) -> list[R]:
        """Return the rows of one kind of all processes."""
        return [row for one in self.processes for row in one.rows_of(kind)]

    @cached_property
    def modules(self) -> list[rows.ModuleRow]:
        """The wrapped modules with their buckets, as each process has recorded them."""
        return self.rows_of(rows.ModuleRow)


def run_of(processes: Sequence[ProcessTrace]) -> Run:
    """Put the steps of all processes together.

    Args:
        processes: the traces of all processes.
    """
    processes = _last_lives(processes)
    main = main_module(row for one in processes for row in one.found)
    clocks = _clocks(processes)
    steps: dict[int, dict[int, RankStep]] = {}
    for one in processes:
        clock = clocks.get(one.process.clock, Clock(()))  # no offset: the clock of the first process
        for step in steps_of(one.found, one.process.rank, main, clock.at):
            steps.setdefault(step.step, {})[step.rank] = step
    return Run(
        module=main,
        processes=processes,
        steps=dict(sorted(steps.items())),
        clock_error=max((clock.error for clock in clocks.values()), default=0),
    )


def _last_lives(processes: Sequence[ProcessTrace]) -> list[ProcessTrace]:
    """Return the processes of the last life of a job: those since its last restart.

    Processes whose times overlap belong to one life. A process that joins others belongs to their life.
    """
    found: list[ProcessTrace] = []
    begins = float("inf")
    for one in sorted(processes, key=lambda one: -one.unix_seconds(one.last_at)):
        if found and one.unix_seconds(one.last_at) < begins - _RESTART_SECONDS:
            break
        found.append(one)
        begins = min(begins, one.process.unix_seconds)
    return sorted(found, key=lambda one: (one.process.rank, one.process.unix_seconds))


def _clocks(processes: Sequence[ProcessTrace]) -> dict[str, Clock]:
    """Compare each clock with that of the first process."""
    by_clock: dict[str, list[ProcessTrace]] = {}
    for one in processes:
        by_clock.setdefault(one.process.clock, []).append(one)
    clocks = list(by_clock.values())
    if len(clocks) < 2:
        return {}
    first = _meetings_of(clocks[0])
    found = {}
    for others in clocks[1:]:
        here, other = clocks[0][0].process, others[0].process
        by_system = round(1e6 * (other.unix_seconds - here.unix_seconds)) - other.at + here.at
        # Without a meeting, use the system clocks, which usually differ by some milliseconds.
        by_system_clock = Clock([Offset(0, by_system, _SYSTEM_ERROR)])
        found[other.clock] = compared(first, _meetings_of(others)) or by_system_clock
    return found


def _meetings_of(processes: Iterable[ProcessTrace]) -> Meetings:
    """Return the operations in which processes that read one clock took part.

    An operation lasts from its latest begin to its earliest end among these processes.
    """
    found: dict[tuple[object, ...], Meeting] = {}
    for one in processes:
        own: dict[tuple[object, ...], Meeting] = {}
        for row in one.rows_of(rows.BackwardRow):
            for bucket, sent, _, reduced in row.buckets:  # only of the first attempt of a step
                own.setdefault((row.module, row.step, bucket), Meeting(row.step, sent, reduced))
        for key, (step, began, ended) in own.items():
            other = found.get(key, own[key])
            found[key] = Meeting(step, max(began, other.began), min(ended, other.ended))
    return found
