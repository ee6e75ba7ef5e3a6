"""One run, as the report sees it: the steps of all ranks, on one clock (pure functions)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from syncline.tools.report.clocks import SAME, Clock, Meeting, compared
from syncline.tools.report.load import ProcessTrace
from syncline.tools.report.steps import RankStep, main_module, steps_of
from syncline.tracing import rows

_WARM_UP_STEPS = 3
"""The first steps are slower: memory is allocated, and buckets are laid out again."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The steps of all ranks."""

    module: str | None
    """The wrapped module that defines the steps; None if no step was recorded."""
    processes: Sequence[ProcessTrace]
    steps: Mapping[int, Mapping[int, RankStep]]
    """The steps of each rank, by the number of the step and by rank."""
    layouts: Mapping[tuple[str, int], rows.ModuleRow]
    """The buckets, by module and number of the layout."""
    clock_error: int
    """How well times of different hosts can be compared, in microseconds; 0 on one host."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks at the end of the run."""
        sizes = [one.process.num_ranks for one in self.processes]
        changes = [row for one in self.processes for row in one.found if isinstance(row, rows.RanksRow)]
        return max(changes, key=lambda row: row.step).num_ranks if changes else max(sizes, default=0)

    @property
    def steady(self) -> list[int]:
        """The steps from which figures are computed: complete, after the first ones, and not discarded."""
        complete = [
            number
            for number, ranks in self.steps.items()
            if len(ranks) == max(map(len, self.steps.values()))
            and not any(one.is_discarded for one in ranks.values())
        ]
        later = [number for number in complete if number > _WARM_UP_STEPS]
        return later or complete

    def length(self, number: int) -> int:
        """Return the length of a step, in microseconds: the median of the ranks."""
        return median_low(one.length for one in self.steps[number].values())

    def layout_of(self, module: str, number: int) -> rows.ModuleRow | None:
        """Return the buckets of a module."""
        return self.layouts.get((module, number))


def run_of(processes: Sequence[ProcessTrace]) -> Run:
    """Put the steps of all processes together.

    Args:
        processes: what each process has recorded.
    """
    everything = [row for one in processes for row in one.found]
    clocks = _clocks(processes)
    steps: dict[int, dict[int, RankStep]] = {}
    for one in processes:
        clock = clocks.get(one.process.clock, SAME)
        for step in steps_of(one.found, one.process.rank, clock.at):
            steps.setdefault(step.step, {})[step.rank] = step
    layouts = {(row.module, row.layout): row for row in everything if isinstance(row, rows.ModuleRow)}
    return Run(
        module=main_module(everything),
        processes=processes,
        steps=dict(sorted(steps.items())),
        layouts=layouts,
        clock_error=max((clock.error for clock in clocks.values()), default=0),
    )


def _clocks(processes: Sequence[ProcessTrace]) -> dict[str, Clock]:
    """Compare each clock with that of the first process."""
    by_clock: dict[str, list[ProcessTrace]] = {}
    for one in processes:
        by_clock.setdefault(one.process.clock, []).append(one)
    clocks = list(by_clock.values())
    if len(clocks) < 2:
        return {}
    first = meetings_of(clocks[0])
    found = {}
    for others in clocks[1:]:
        clock = compared(first, meetings_of(others))
        if clock is not None:
            found[others[0].process.clock] = clock
    return found


def meetings_of(processes: Iterable[ProcessTrace]) -> dict[tuple[object, ...], Meeting]:
    """Return the operations in which processes that read one clock took part.

    Of several processes of one clock, the last one that has begun counts, and the first one that has ended.
    """
    found: dict[tuple[object, ...], Meeting] = {}

    def add(key: tuple[object, ...], step: int, began: int, ended: int) -> None:
        other = found.get(key)
        if other is not None:
            began, ended = max(began, other.began), min(ended, other.ended)
        found[key] = Meeting(key, step, began, ended)

    for one in processes:
        nth: Counter[tuple[object, ...]] = Counter()
        for row in one.found:
            if isinstance(row, rows.BackwardRow):
                for bucket, sent, _, reduced in row.buckets:
                    key = (row.module, row.step, bucket)
                    nth[key] += 1
                    if nth[key] == 1:  # not the second attempt of a step
                        add(key, row.step, sent, reduced)
    return found
