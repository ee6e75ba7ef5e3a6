"""The present state of each rank of a run, and a diagnosis of the run, in words (pure functions).

A rank that trains records rows, and its last row says in which phase it is. A rank that hangs records nothing more by
itself, but a thread of it still records where it is (`PlaceRow`).
"""

from __future__ import annotations

import itertools
import textwrap
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import IntEnum, auto
from statistics import median

from syncline.tracing import rows
from syncline.words import MAX_COLUMNS, describe_ranks, format_time

_NUM_STEPS = 50
"""The number of last steps over which times are taken."""

STILL_SECONDS = 5.0
"""A rank that has recorded no step for longer than this, and for longer than ten of its steps, stands still."""

_ENOUGH_STEPS = 10
"""The number of steps that are needed to say for which rank the others wait."""

_MOST_LINES = 70

_SILENT_SECONDS = 12.0

_BY_OTHERS = ("KeyboardInterrupt", "CollectiveTimeout", "PeerFailed", "PeerLost")
"""The exceptions that end a hung rank: from outside, or because of other ranks."""


class Condition(IntEnum):
    """The condition of a rank. Conditions that best explain why a run does not continue come first."""

    GONE = auto()
    """It shows no sign of life."""
    FAILED = auto()
    STILL = auto()
    """It makes no progress, and does not wait for others."""
    WAITING = auto()
    """It makes no progress, and was last seen in a call in which it waits for others."""
    TRAINING = auto()
    ENDED = auto()


class RankState:
    """The state of one rank, as its trace shows it.

    Args:
        rank: the number of the rank, until it has recorded another one.
        started_at: when its process was started, in seconds of `time.monotonic`.

    Examples:
        >>> state = RankState()
        >>> state.add([rows.PlaceRow(5, 3, "step 3, forward")], at=100.0)
        >>> state.words(now=110.0)
        'step 3, forward'
    """

    def __init__(self, rank: int = 0, *, started_at: float = 0.0) -> None:
        self.process: rows.ProcessRow | None = None
        self.rank = rank
        self.step = 0
        """The last step whose backward has ended."""
        self.end: rows.EndRow | None = None
        self.changed_at = started_at
        """The time of its last row other than a place, in seconds of `time.monotonic`."""
        self.hung = False
        """Whether it stood still until it was ended."""
        self.place = ""
        self._seen_at = started_at
        self._module = ""
        """The module whose steps are counted: the first one."""
        self._phase = "before its first step"
        self._steps: deque[tuple[int, int]] = deque(maxlen=_NUM_STEPS)
        """The end of each of the last steps, and the time for which the rank waited for buckets in it."""

    def add(self, found: Sequence[rows.Row], at: float) -> None:
        """Add new rows.

        Args:
            found: the rows.
            at: when the last of them was written, in seconds of `time.monotonic`.
        """
        last = max((time for row in found if (time := rows.time_of(row)) is not None), default=0)
        for row in found:
            match row:
                case rows.ProcessRow():
                    self.process, self.rank = row, row.rank
                case rows.ForwardRow():
                    self._phase = "between forward and backward" if row.is_training else "in an evaluation"
                case rows.BackwardRow():
                    self._phase = "after the backward"
                    self._backward_ended(row)
                case rows.OptimizerRow():
                    self._phase = "before the forward"
                case rows.RanksRow():
                    self.rank = row.rank
                case rows.PlaceRow():
                    self.place = row.words
                    continue
                case rows.EndRow():
                    was_still = self.condition(at) in (Condition.STILL, Condition.WAITING)
                    self.hung = was_still and any(map(row.is_of, _BY_OTHERS))
                    self.end = row
                    if self.hung:
                        continue
            time = rows.time_of(row)
            self.changed_at = at if time is None else at - (last - time) / 1e6
        self._seen_at = at

    def _backward_ended(self, row: rows.BackwardRow) -> None:
        self._module = self._module or row.module
        if row.module != self._module:
            return
        waited = sum(ended - began for _, _, began, ended in row.buckets)
        if row.step == self.step and self._steps:  # one more micro-batch
            waited += self._steps.pop()[1]
        self._steps.append((row.ended, waited))
        self.step = row.step

    @property
    def lengths(self) -> list[int]:
        """The lengths of the last steps, in microseconds."""
        return [two - one for (one, _), (two, _) in itertools.pairwise(self._steps)]

    @property
    def step_seconds(self) -> float | None:
        """The median length of the last steps; None before the second one."""
        return median(self.lengths) / 1e6 if self.lengths else None

    @property
    def waiting_share(self) -> float:
        """The fraction of the last steps in which the rank has waited for buckets."""
        seconds = self.step_seconds
        return min(1.0, median(waited for _, waited in self._steps) / 1e6 / seconds) if seconds else 0.0

    def condition(self, now: float) -> Condition:
        """Return the condition of the rank at a time."""
        if self.end is not None and not self.hung:
            return Condition.FAILED if self.end.is_error else Condition.ENDED
        # One of several ranks records its place at least every 5 seconds.
        is_seen = self.process is not None and self.process.num_ranks > 1 and self.place
        if is_seen and self.end is None and now - self._seen_at > _SILENT_SECONDS:
            return Condition.GONE
        if now - self.changed_at <= max(STILL_SECONDS, 10 * (self.step_seconds or 0.0)):
            return Condition.TRAINING
        return Condition.WAITING if "waiting in" in self.place else Condition.STILL

    def words(self, now: float) -> str:
        """Return the state of the rank in words."""
        if self.condition(now) == Condition.GONE:
            return f"no sign of life for {now - self._seen_at:.0f} s: its process was killed, or is stopped"
        place = self.place if self.place and now - self.changed_at > 2.0 else self._phase
        if self.end is None:
            return place
        end = f"ended: {self.end.error}" if self.end.is_error else self.end.words
        return f"{place}; {end}" if self.hung else end


def present(states: Sequence[RankState]) -> list[RankState]:
    """Return the newest process of each rank, without those that were replaced, or whose rank is no longer there."""
    found: dict[int, RankState] = {}
    num_ranks = None
    for one in sorted(states, key=lambda one: one.process.unix_seconds if one.process else 0.0):
        found[one.rank] = one
        if one.process is not None:
            num_ranks = one.process.num_ranks
    return [one for rank, one in found.items() if num_ranks is None or rank < num_ranks]


def screen(
    states: Sequence[RankState], now: float, *, columns: int = MAX_COLUMNS + 1, lines: int = _MOST_LINES
) -> str:
    """Return a line for each rank, and a diagnosis of the run.

    Args:
        states: the states of all ranks.
        now: the time, in seconds of `time.monotonic`.
        columns: where to wrap lines.
        lines: the largest number of lines. If not all ranks fit, the most informative lines are shown.
    """
    end = _wrapped(meaning(states, now), "", columns)
    ordered = sorted(states, key=lambda one: (one.condition(now), one.rank))
    entries = [(one.rank, _entry(one, now, columns)) for one in ordered]
    totals = itertools.accumulate(len(entry) for _, entry in entries)
    shown = entries[: max(1, sum(total <= lines - len(end) - 3 for total in totals))]
    text = [f"{'rank':>5}  {'step':>8}  {'median step':>11}  {'waits':>6}  now"]
    text += itertools.chain.from_iterable(entry for _, entry in sorted(shown))
    if len(shown) < len(entries):
        text.append(f"       and {len(entries) - len(shown)} more ranks")
    return "\n".join([*text, "", *end])


def _entry(one: RankState, now: float, columns: int) -> list[str]:
    seconds = one.step_seconds
    length = "-" if seconds is None else format_time(seconds)
    share = "-" if seconds is None else f"{100 * one.waiting_share:.0f} %"
    head = f"{one.rank:>5}  {one.step:>8}  {length:>11}  {share:>6}  "
    return _wrapped(one.words(now), head, columns)


def _wrapped(text: str, head: str, columns: int) -> list[str]:
    indent, width = " " * min(len(head), columns // 2), max(columns - 1, 20)
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def have_hung(states: Sequence[RankState], now: float) -> bool:
    """Return whether the ranks stand still, or stood still until they were ended.

    The result is False if no rank has made a step, and no place is known: ranks may still import packages, or may
    make no steps with Syncline.
    """
    found = {one.condition(now) for one in states} - {Condition.ENDED}
    has_place = any(one.step or one.place for one in states)
    return has_place and bool(found) and not found & {Condition.TRAINING, Condition.FAILED}


def meaning(states: Sequence[RankState], now: float) -> str:
    """Return a sentence that says how the run is going, and where to look if it stands still."""
    ranks: defaultdict[Condition, list[int]] = defaultdict(list)
    for one in states:
        ranks[one.condition(now)].append(one.rank)
    if gone := ranks[Condition.GONE]:
        return f"No sign of life: {describe_ranks(gone)}."
    if all(one.end is not None for one in states) and not have_hung(states, now):
        failed = ranks[Condition.FAILED]
        return f"All ranks have ended{f', {describe_ranks(failed)} with an error' if failed else ''}."
    alive = [one for one in states if one.end is None or one.hung]
    if ranks[Condition.TRAINING]:
        return _waits_for_whom([one for one in alive if one.lengths])
    seconds = min(now - one.changed_at for one in alive)
    text = f"No rank has ended a step yet: starting, {seconds:.0f} s."
    if any(one.step for one in alive):
        text = f"No rank has made progress for {seconds:.0f} s."
    waiting, still = ranks[Condition.WAITING], ranks[Condition.STILL]
    if waiting and still:
        text += f" Waiting for others: {describe_ranks(waiting)}."
        return f"{text} Not waiting, so look there: {describe_ranks(still)}."
    return f"{text} All of them wait: compare the calls in which they wait." if waiting else text


def _waits_for_whom(states: Sequence[RankState]) -> str:
    if not states:
        return "No rank has ended two steps yet."
    if len(states) < 2 or any(len(one.lengths) < _ENOUGH_STEPS for one in states):
        return "Training."
    least, *others = sorted(states, key=lambda one: one.waiting_share)
    usual = median(one.waiting_share for one in others)
    if usual - least.waiting_share < 0.05:
        return "Training; no rank waits much longer than the others."
    return (
        f"Training; the others wait {100 * usual:.0f} % of the time, rank {least.rank} "
        f"{100 * least.waiting_share:.0f} % (medians): they wait for it."
    )
