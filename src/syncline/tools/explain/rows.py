"""From the events of one step to the rows of its picture (pure functions)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from syncline.events import (
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    GradientReady,
    OptimizerStepped,
    ParametersSynced,
)
from syncline.records import BucketRecord
from syncline.tools.explain.report import Kind, Row
from syncline.words import format_bytes, format_count, format_names, format_time


class Backward(NamedTuple):
    """A backward, with the records of its buckets."""

    event: BackwardEnded
    buckets: Sequence[BucketRecord]


class Update(NamedTuple):
    """A step of an optimizer of any kind, attached or not."""

    optimizer: str
    began_at: float
    ended_at: float


@dataclass
class StepEvents:
    """The events of one step of this rank, in order of time."""

    forwards: list[ForwardEnded] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    ready: list[GradientReady] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    attached: list[OptimizerStepped] = field(default_factory=list)
    rounds: list[ParametersSynced] = field(default_factory=list)
    calls: list[CallEnded] = field(default_factory=list)

    def is_complete_for(self, module: str) -> bool:
        """Return whether a next forward of a module begins another step.

        It does if the module has run, and since then its gradients were reduced, or an optimizer has stepped.
        """
        ended = [one.event for one in self.backwards if one.event.source.module == module]
        if not ended or not any(one.source.module == module for one in self.forwards):
            return False
        return any(one.is_synchronized for one in ended) or any(
            update.ended_at > ended[0].ended_at for update in self.updates
        )

    @property
    def is_complete(self) -> bool:
        """Whether a next forward of one of its modules begins another step."""
        return any(self.is_complete_for(one.source.module) for one in self.forwards)

    @property
    def meets_others(self) -> bool:
        """Whether this rank sends gradients or parameters in this step."""
        return bool(self.rounds) or any(one.event.is_synchronized for one in self.backwards)

    @property
    def began_at(self) -> float:
        return self.forwards[0].began_at

    @property
    def ended_at(self) -> float:
        ends = [one.ended_at for one in self.forwards] + [one.event.ended_at for one in self.backwards]
        ends += [one.ended_at for one in self.updates] + [one.ended_at for one in self.attached]
        ends += [one.ended_at for one in self.rounds] + [one.ended_at for one in self.calls]
        return max(ends)


def rows_of(step: StepEvents) -> list[Row]:
    """Return the rows of the picture of a step."""
    modules = list(dict.fromkeys(one.source.module for one in step.forwards))
    rows: list[Row] = []
    for module in modules:
        of = f" of {module}" if len(modules) > 1 else ""
        rows += _of_module(step, module, of)
    for name in dict.fromkeys(one.optimizer for one in step.updates):
        spans = [(one.began_at, one.ended_at) for one in step.updates if one.optimizer == name]
        rows.append(_row("optimizer", f"optimizer {name}", spans, step))
    for each in step.rounds:
        label = f"round, {format_bytes(each.record.payload_bytes)}"
        spans = [(each.began_at, each.ended_at)]
        rows.append(_row("round", label, spans, step, detail="; ".join(each.record.what)))
    for name in dict.fromkeys(one.name for one in step.calls):
        spans = [(one.began_at, one.ended_at) for one in step.calls if one.name == name]
        rows.append(_row("call", f"call {name}", spans, step, note=format_count(len(spans), "call")))
    return rows


def _of_module(step: StepEvents, module: str, of: str) -> list[Row]:
    forwards = [one for one in step.forwards if one.source.module == module]
    backwards = [one for one in step.backwards if one.event.source.module == module]
    rows: list[Row] = []
    sent = [one for one in forwards if one.buffers is not None and one.buffers.sent]
    if sent:
        size = format_bytes(sum(one.buffers.payload_bytes for one in sent if one.buffers is not None))
        spans = [(one.began_at, one.computed_from) for one in sent]
        rows.append(_row("buffers", f"buffers{of}, {size}", spans, step))
    spans = [(one.computed_from, one.ended_at) for one in forwards]
    rows.append(_row("forward", f"forward{of}", spans, step))
    spans = [(one.event.began_at, one.event.ended_at) for one in backwards]
    if spans:
        rows.append(_row("backward", f"backward{of}", spans, step))
    for backward in backwards:
        rows += _of_buckets(step, backward)
    return rows


def _of_buckets(step: StepEvents, backward: Backward) -> list[Row]:
    """Return a row for each bucket of a backward, and one for the wait at its end."""
    event = backward.event
    if not event.buckets:
        return []
    ready = {
        one.parameter: one.at
        for one in step.ready
        if one.source == event.source and event.began_at <= one.at <= event.ended_at
    }
    sent_at = {index: sent for index, sent, _, _ in event.buckets}
    rows: list[Row] = []
    for record in backward.buckets:
        sent = sent_at[record.index]
        first = min((ready[name] for name in record.parameters if name in ready), default=event.began_at)
        rows.append(
            _row(
                "bucket",
                f"  bucket {record.index}, {format_bytes(record.payload_bytes)}",
                [(min(first, sent), sent)],
                step,
                note=f"sent at {format_time(sent - step.began_at)}",
                detail=format_names(record.parameters),
            )
        )
    waits = [(began, ended) for _, _, began, ended in event.buckets]
    rows.append(_row("wait", "  wait", waits, step))
    return rows


def _row(
    kind: Kind,
    label: str,
    spans: Sequence[tuple[float, float]],
    step: StepEvents,
    *,
    note: str | None = None,
    detail: str = "",
) -> Row:
    """Return a row. Its note is the total time of its spans, unless another note is given."""
    began = step.began_at
    took = format_time(sum(end - start for start, end in spans))
    relative = [(start - began, end - began) for start, end in spans]
    return Row(kind, label, relative, took if note is None else note, detail)
