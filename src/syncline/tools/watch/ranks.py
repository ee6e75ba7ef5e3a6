"""The present state of each rank of a run, and what it means, in words (pure functions).

A rank that trains records rows, and its last row says in which phase it is. A rank that hangs records nothing more by
itself, but a thread of it still records where it is (`PlaceRow`).
"""

from __future__ import annotations

import itertools
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from syncline.tracing import rows
from syncline.words import MAX_COLUMNS, describe_ranks, format_time

_NUM_STEPS = 50
"""The number of last steps over which times are taken."""

STILL_SECONDS = 5.0
"""A rank that has recorded no step for longer than this, and for longer than ten of its steps, stands still."""

_ENOUGH_STEPS = 10
"""From so many steps on, it is said for which rank the others wait."""

_MAX_RANKS = 64

_SILENT_SECONDS = 12.0

_WAITING = "waiting in"


class RankState:
    """What is known of one rank.

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
        """When it last recorded something but its place, in seconds of `time.monotonic`."""
        self.seen_at = started_at
        """When it last recorded anything."""
        self.num_events = 0
        """How many things it has recorded that have happened: all but its place, its beginning and its end."""
        self._module = ""
        """The module whose steps are counted: the first one."""
        self._phase = "before its first step"
        self._place = ""
        self._ends: deque[int] = deque(maxlen=_NUM_STEPS)
        self._waits: deque[int] = deque(maxlen=_NUM_STEPS)

    def add(self, found: Sequence[rows.Row], at: float) -> None:
        """Add new rows.

        Args:
            found: the rows.
            at: when the last of them was written, in seconds of `time.monotonic`.
        """
        times = [time for row in found if (time := rows.time_of(row)) is not None]
        last = max(times, default=0)
        for row in found:
            match row:
                case rows.ProcessRow():
                    self.process, self.rank = row, row.rank
                case rows.ForwardRow():
                    self._phase = "between forward and backward" if row.is_training else "in an evaluation"
                case rows.BackwardRow():
                    self._phase = "after the backward"
                    if row.module == (self._module or row.module):
                        self._module = row.module
                        self._backward_ended(row)
                case rows.OptimizerRow():
                    self._phase = "before the forward"
                case rows.RanksRow():
                    self.rank = row.rank
                case rows.PlaceRow():
                    self._place = row.words
                    continue
                case rows.EndRow():
                    self.end = row
                case _:
                    pass
            self.num_events += not isinstance(row, rows.ProcessRow | rows.EndRow)
            time = rows.time_of(row)
            self.changed_at = at if time is None else at - (last - time) / 1e6
        self.seen_at = at

    def _backward_ended(self, row: rows.BackwardRow) -> None:
        waited = sum(ended - began for _, _, began, ended in row.buckets)
        if row.step == self.step and self._ends:  # one more micro-batch
            self._ends[-1] = row.ended
            self._waits[-1] += waited
        else:
            self._ends.append(row.ended)
            self._waits.append(waited)
        self.step = row.step

    @property
    def step_seconds(self) -> float | None:
        """The median length of the last steps; None before the second one."""
        lengths = [two - one for one, two in itertools.pairwise(self._ends)]
        return median(lengths) / 1e6 if lengths else None

    @property
    def waiting_share(self) -> float:
        """The part of the last steps in which the rank has waited for buckets."""
        seconds = self.step_seconds
        return 0.0 if not seconds else min(1.0, median(self._waits) / 1e6 / seconds)

    @property
    def num_timed(self) -> int:
        """The number of last steps whose length is known."""
        return max(0, len(self._ends) - 1)

    def stands_still(self, now: float) -> bool:
        """Return whether the rank has recorded no progress for long."""
        return self.end is None and now - self.changed_at > max(
            STILL_SECONDS, 10 * (self.step_seconds or 0.0)
        )

    def words(self, now: float) -> str:
        """Return in words what the rank is doing."""
        if self.end is not None:
            return f"ended: {self.end.error}" if self.end.is_error else self.end.words
        if self.is_gone(now):
            return f"no sign of life for {now - self.seen_at:.0f} s: its process was killed, or is stopped"
        return self._place if self._place and now - self.changed_at > 2.0 else self._phase

    def is_gone(self, now: float) -> bool:
        """Return whether the process shows no sign of life. One of several ranks shows one every 5 seconds."""
        several = self.process is not None and self.process.num_ranks > 1 and bool(self._place)
        return self.end is None and several and now - self.seen_at > _SILENT_SECONDS

    @property
    def has_place(self) -> bool:
        """Whether it is known where the rank was."""
        return bool(self.num_events or self._place)

    @property
    def is_waiting(self) -> bool:
        """Whether the rank was last seen in a call in which it waits for others."""
        return _WAITING in self._place


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
    states: Sequence[RankState], now: float, *, columns: int = MAX_COLUMNS + 1, lines: int | None = None
) -> str:
    """Return a line for each rank, and what it means.

    Args:
        states: the states of all ranks.
        now: the time, in seconds of `time.monotonic`.
        columns: where to wrap lines.
        lines: the largest number of lines. If not all ranks fit, those that say most are shown. None means no limit.
    """
    end = _wrapped(meaning(states, now), "", columns)
    entries = {one.rank: _entry(one, now, columns) for one in states}
    left = None if lines is None else lines - len(end) - 3
    shown: list[int] = []
    for one in sorted(states, key=lambda one: _says_little(one, now))[:_MAX_RANKS]:
        if left is not None:
            left -= len(entries[one.rank])
            if left < 0 and shown:
                break
        shown.append(one.rank)
    text = [f"{'rank':>5}  {'step':>8}  {'median step':>11}  {'waits':>6}  now"]
    text += itertools.chain.from_iterable(entries[rank] for rank in sorted(shown))
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
    indent = " " * (len(head) if columns >= 2 * len(head) else min(4, columns // 4))
    return textwrap.wrap(
        text, max(columns - 1, 20), initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


def _says_little(one: RankState, now: float) -> tuple[int, int]:
    """Return a key by which ranks are sorted: first those that tell why a run does not go on."""
    if one.end is not None and not one.end.is_error:
        return 4, one.rank
    if one.end is not None or one.is_gone(now):
        return 0, one.rank
    return (3 if not one.stands_still(now) else 2 if one.is_waiting else 1), one.rank


def stand_still(states: Sequence[RankState], now: float) -> bool:
    """Return whether all ranks that have not ended stand still."""
    alive = [one for one in states if one.end is None]
    return bool(alive) and all(one.stands_still(now) or one.is_gone(now) for one in alive)


def meaning(states: Sequence[RankState], now: float) -> str:
    """Return a sentence that says how the run is going, and where to look if it stands still."""
    gone = [one.rank for one in states if one.is_gone(now)]
    if gone:
        return f"{describe_ranks(gone).capitalize()} {'shows' if len(gone) == 1 else 'show'} no sign of life."
    alive = [one for one in states if one.end is None]
    if not alive:
        ends = {one.rank: one.end for one in states if one.end is not None}
        if failed := [rank for rank, end in ends.items() if end.is_error]:
            return f"All ranks have ended, {describe_ranks(failed)} with an error."
        if any(end.is_of("KeyboardInterrupt") for end in ends.values()):
            return "The run was stopped by Ctrl-C."
        return "All ranks have ended."
    still = [one for one in alive if one.stands_still(now)]
    if len(still) < len(alive):
        times = {one.rank: one for one in alive if one.step_seconds is not None}
        return _waits_for_whom(times)
    seconds = min(now - one.changed_at for one in still)
    waiting = [one.rank for one in still if one.is_waiting]
    others = [one.rank for one in still if not one.is_waiting]
    text = f"No rank has made progress for {seconds:.0f} s."
    if not any(one.step for one in still):
        text = f"No rank has ended a step yet: starting, {seconds:.0f} s."
    if waiting and others:
        verb = (
            "does not: look at the line where it is"
            if len(others) == 1
            else "do not: look at the lines where they are"
        )
        wait = "waits" if len(waiting) == 1 else "wait"
        return f"{text} {describe_ranks(waiting).capitalize()} {wait} for others; {describe_ranks(others)} {verb}."
    if waiting:
        return f"{text} All of them wait: compare the calls in which they wait."
    return text


def _waits_for_whom(states: Mapping[int, RankState]) -> str:
    if not states:
        return "No rank has ended two steps yet."
    if len(states) < 2 or any(one.num_timed < _ENOUGH_STEPS for one in states.values()):
        return "Training."
    shares = {rank: one.waiting_share for rank, one in states.items()}
    least = min(shares, key=lambda rank: shares[rank])
    others = [share for rank, share in shares.items() if rank != least]
    if median(others) - shares[least] < 0.05:
        return "Training; no rank waits much longer than the others."
    return (
        f"Training; the others wait {100 * median(others):.0f} % of the time, rank {least} "
        f"{100 * shares[least]:.0f} % (medians): they wait for it."
    )
