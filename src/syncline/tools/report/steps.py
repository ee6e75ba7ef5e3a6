"""From rows to steps (pure functions): which rows of a process belong to which step, and what the step consists of.

A step of a process lasts from the end of the one before to its own end. It ends with the last optimizer step or
parameter sync before the forward of the next step; if no optimizer is attached, with the backward.

If a program trains several wrapped modules, the one with the highest step defines the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from syncline.tracing import rows

Kind = Literal[
    "data", "buffers", "forward", "loss", "backward", "wait", "update", "optimizer", "sync", "call"
]


class Span(NamedTuple):
    """An activity of a rank, with its begin and its end in microseconds."""

    kind: Kind
    began: int
    ended: int
    label: str = ""

    @property
    def length(self) -> int:
        return self.ended - self.began


class Sent(NamedTuple):
    """One bucket in one backward of one rank."""

    module: str
    step: int
    """The step of its own module."""
    bucket: int
    payload_bytes: int
    """Its bytes; 0 if they are unknown."""
    parameters: Sequence[str]
    began: int
    """When its backward began."""
    sent: int
    wait_began: int
    reduced: int
    """The time at which this rank had the reduced bucket, after it had waited for it."""

    @property
    def reduction(self) -> tuple[str, int, int]:
        """The key of the reduction, which all ranks make. A module can have several in a step of the main one."""
        return self.module, self.step, self.bucket


@dataclass(kw_only=True)
class RankStep:
    """One step of one rank. All times are in microseconds of one clock."""

    rank: int
    step: int
    began: int
    ended: int
    spans: list[Span] = field(default_factory=list)
    """The activities of the rank from `began` to `ended`, in order of time, without gaps."""
    buckets: list[Sent] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    is_discarded: bool = False
    payload_bytes: int = 0
    """Bytes of the buffers and parameters that were synchronized in the step, without the buckets."""

    @property
    def length(self) -> int:
        return self.ended - self.began


def main_module(found: Iterable[rows.Row]) -> str | None:
    """Return the module that defines the steps; None if no backward was recorded."""
    last: Counter[str] = Counter()
    for row in found:
        if isinstance(row, rows.BackwardRow):
            last[row.module] = max(last[row.module], row.step)
    return last.most_common(1)[0][0] if last else None


def steps_of(
    found: Sequence[rows.Row], rank: int, main: str | None, offset: Callable[[int], int]
) -> list[RankStep]:
    """Return the complete steps of one process.

    The first step is left out, because its beginning is unknown. A step after a gap in the rows is left out, too.

    Args:
        found: the rows of the process.
        rank: the rank of the process. A `RanksRow` changes it.
        main: the module that defines the steps; see `main_module`.
        offset: a function that returns the number to add to the times of a step, which converts them to the clock of
            all ranks.
    """
    builder = _Builder(rank, main or "", offset)
    for row in found:
        builder.add(row)
    builder.close()
    return builder.steps


_Work = rows.ForwardRow | rows.BackwardRow | rows.OptimizerRow | rows.SyncRow | rows.CallRow
"""The rows about activities that have a begin and an end."""


class _Builder:
    """The steps of a process, while its rows are read."""

    def __init__(self, rank: int, main: str, offset: Callable[[int], int]) -> None:
        self.steps: list[RankStep] = []
        self._rank, self._main, self._offset = rank, main, offset
        self._layouts: dict[tuple[str, int], dict[int, Sequence[Any]]] = {}
        """The bytes and the parameters of the buckets by their indices, for each layout of each module."""
        self._number: int | None = None
        """The number of the present step; None before the first forward or backward."""
        self._last: int | None = None
        """The number of the step before; None at the beginning, and after a change of the ranks."""
        self._rows: list[_Work] = []
        self._began: int | None = None
        """When the present step began; None if that is unknown."""
        self._is_done = False
        """Whether the backward of the present step has ended."""

    def add(self, row: rows.Row) -> None:
        """Add the next row."""
        if isinstance(row, rows.ModuleRow):
            self._layouts[row.module, row.layout] = {index: about for index, *about in row.buckets}
        if isinstance(row, rows.ProcessRow):
            self._rank = row.rank
        if isinstance(row, rows.RanksRow):
            self.close()
            self._rows, self._began, self._is_done = [], row.ended, False
            self._number = self._last = None
            self._rank = row.rank
            return
        if isinstance(row, rows.ForwardRow | rows.BackwardRow) and row.module == self._main:
            if isinstance(row, rows.BackwardRow) or row.is_training:
                if self._is_done and row.step != self._number:
                    self.close()
                self._number = row.step
            self._is_done |= isinstance(row, rows.BackwardRow)
        if isinstance(row, _Work):
            self._rows.append(row)

    def close(self) -> None:
        """End the present step."""
        if not self._is_done or self._number is None:
            return
        last = rows.BackwardRow | rows.OptimizerRow | rows.SyncRow
        ended = max(row.ended for row in self._rows if isinstance(row, last))
        inside = [row for row in self._rows if row.began < ended]
        rest = [row for row in self._rows if row.began >= ended]
        is_next = self._last is None or self._number == self._last + 1
        if self._began is not None and is_next:
            self.steps.append(self._step(self._number, inside, self._began, ended))
        self._last = self._number
        self._rows, self._began, self._is_done = rest, ended, False

    def _step(self, number: int, found: Sequence[_Work], began: int, ended: int) -> RankStep:
        move = self._offset(number)
        step = RankStep(rank=self._rank, step=number, began=began + move, ended=ended + move)
        spans: list[Span] = []
        for row in found:
            match row:
                case rows.ForwardRow():
                    computed_from = row.computed_from if row.buffer_bytes else row.began
                    spans.append(Span("buffers", row.began, computed_from))
                    spans.append(Span("forward", computed_from, row.ended, row.module))
                    step.payload_bytes += row.buffer_bytes
                case rows.BackwardRow():
                    spans += _backward(row)
                    layout = self._layouts.get((row.module, row.layout), {})
                    for index, *times in row.buckets:
                        moved = (time + move for time in (row.began, *times))
                        about = layout.get(index, (0, ()))
                        step.buckets.append(Sent(row.module, row.step, index, *about, *moved))
                    if row.module == self._main:
                        step.metrics, step.unused = dict(row.metrics), tuple(row.unused)
                case rows.OptimizerRow():
                    spans.append(Span("optimizer", row.began, row.ended, row.optimizer))
                    step.is_discarded |= row.is_discarded
                case rows.SyncRow():
                    spans.append(Span("sync", row.began, row.ended, "; ".join(row.what)))
                    step.payload_bytes += row.payload_bytes
                case rows.CallRow():
                    spans.append(Span("call", row.began, row.ended, row.name))
        step.spans = [
            span._replace(began=span.began + move, ended=span.ended + move)
            for span in without_gaps(spans, began, ended)
        ]
        return step


def _backward(row: rows.BackwardRow) -> list[Span]:
    """Return the parts of a backward: the computation, and the wait for each bucket."""
    spans, at = [], row.began
    for index, _, began, ended in sorted(row.buckets, key=lambda one: one[2]):
        if began > at:
            spans.append(Span("backward", at, began, row.module))
        if ended > max(began, at):
            spans.append(Span("wait", max(began, at), ended, f"bucket {index}"))
        at = max(at, ended)
    if row.ended > at:
        spans.append(Span("backward", at, row.ended, row.module))
    return spans


def without_gaps(spans: Iterable[Span], began: int, ended: int) -> list[Span]:
    """Return the spans in order of time, with spans for the time in between, so that the whole step is covered.

    The time between two spans is named after its purpose: before the first forward "data", between a forward and its
    backward "loss", and between a backward and the optimizer's step "update".

    Args:
        spans: the spans. A span that lies inside of another one is left out.
        began: the beginning of the step.
        ended: its end.

    Examples:
        >>> for span in without_gaps([Span("forward", 4, 6), Span("backward", 7, 9)], 0, 9):
        ...     print(span.kind, span.began, span.ended)
        data 0 4
        forward 4 6
        loss 6 7
        backward 7 9
    """
    found: list[Span] = []
    at, has_forward, has_backward = began, False, False
    for span in sorted(_without_waits(list(spans)), key=lambda one: (one.began, -one.ended)):
        if span.ended <= at and span.ended < ended:
            has_forward |= span.kind == "forward"
            continue
        start = max(span.began, at)
        if start > at:
            found.append(
                Span(_between(span.kind, has_forward=has_forward, has_backward=has_backward), at, start)
            )
        if span.ended > start:
            found.append(span._replace(began=start, ended=min(span.ended, ended)))
        at = max(at, min(span.ended, ended))
        has_forward = span.kind in ("forward", "loss") or (
            has_forward and span.kind not in ("backward", "wait")
        )
        has_backward |= span.kind in ("backward", "wait")
    if ended > at:
        found.append(Span("update" if has_backward else "data", at, ended))
    return found


def _without_waits(spans: Sequence[Span]) -> list[Span]:
    """Return the spans, with the waits cut out of backwards around them: two wrapped modules can share a backward."""
    waits = sorted(span for span in spans if span.kind == "wait")
    found = []
    for span in spans:
        at = span.began
        if span.kind == "backward":
            for wait in waits:
                if wait.ended > at and wait.began < span.ended:
                    if wait.began > at:
                        found.append(span._replace(began=at, ended=wait.began))
                    at = max(at, wait.ended)
        if span.ended > at:
            found.append(span._replace(began=at))
    return found


def _between(following: Kind, *, has_forward: bool, has_backward: bool) -> Kind:
    """Return the kind of the time before a span."""
    if following in ("optimizer", "sync", "call") and has_backward:
        return "update"
    return "loss" if following in ("backward", "wait", "call") and has_forward else "data"
