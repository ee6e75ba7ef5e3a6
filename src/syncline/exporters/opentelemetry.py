"""The exporter for OpenTelemetry, on the API package. The program configures the SDK, and where it sends its data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline.checks import checked_count
from syncline.events import (
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    OptimizerStepped,
    ParametersSynced,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
    Source,
)
from syncline.exporters.base import (
    MAX_METRICS,
    MAX_MODULES,
    BucketSizes,
    Exporter,
    Names,
    StepClock,
    exports,
    has_done_something,
    import_client,
    is_of_checkpoints,
    waited_seconds,
)
from syncline.suggestions import suggests_arguments

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | bool | int | float]

_SCOPE = "syncline"


class OpenTelemetry(Exporter):
    """An observer that passes spans and metrics to OpenTelemetry.

    Start it on all ranks, as each observer: by `start()` or in a `with` block. It uses the tracer and the meter of the
    providers that the program has set when the exporter is made (`opentelemetry.trace.set_tracer_provider`,
    `opentelemetry.metrics.set_meter_provider`). Without a provider, OpenTelemetry drops everything. Every span and
    metric has the attribute `syncline.rank`. docs/guides/exporters.md lists them.

    Each span takes time of the step, and a step with many buckets has many spans. So by default only each 10th step has
    spans. Metrics are recorded in each step. Saves, changes of the ranks, slow ranks and replicas that differ always
    have a span.

    If OpenTelemetry raises an error, the exporter warns once and stops. Training continues.

    Args:
        every: record the spans of step 1, and of each step that is so many steps later.

    Raises:
        ImportError: opentelemetry-api is not installed.
        TypeError, ValueError: an argument has a wrong type or value.

    Examples:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with sl.exporters.OpenTelemetry():
        ...     ddp(torch.ones(1, 2)).sum().backward()
    """

    @suggests_arguments
    def __init__(self, *, every: int = 10) -> None:
        super().__init__()
        every = checked_count("every", every, at_least=1)
        names = {"exporter": "OpenTelemetry", "package": "opentelemetry-api", "extra": "opentelemetry"}
        self._spans = _Spans(import_client("opentelemetry.trace", **names), every)
        self._metrics = _Metrics(import_client("opentelemetry.metrics", **names).get_meter(_SCOPE))
        self._clock, self._sizes = StepClock(), BucketSizes()
        self._modules, self._names = Names(MAX_MODULES), Names(MAX_METRICS)

    def stop(self) -> None:
        """Stop receiving events, and end the spans of the last steps."""
        super().stop()
        try:
            self._spans.end_all()
        except Exception as error:
            self._give_up(error)

    def _attributes(self, source: Source) -> dict[str, str | int]:
        return {"syncline.rank": source.rank, "syncline.module": self._modules.label(source.module)}

    @exports
    def forward_ended(self, event: ForwardEnded) -> None:
        rank = {"syncline.rank": event.source.rank}
        if event.buffers is not None:
            self._metrics.bytes.add(event.buffers.payload_bytes, {**rank, "syncline.what": "buffers"})
        if event.is_training:  # an evaluation can have thousands of forwards
            self._spans.begin_step(event.source, event.step, event.began_at)
            self._spans.add(event.source, "forward", event.began_at, event.ended_at)

    @exports
    def backward_ended(self, event: BackwardEnded) -> None:
        source, metrics, attributes = event.source, self._metrics, self._attributes(event.source)
        rank = {"syncline.rank": source.rank}
        self._spans.begin_step(source, event.step, event.began_at)
        self._spans.add_backward(event)
        if event.is_synchronized:
            metrics.wait.record(waited_seconds(event), attributes)
            num_bytes = sum(self._sizes.of(event).values())
            metrics.bytes.add(num_bytes, {**rank, "syncline.what": "gradients"})
        if not event.ends_step:
            return
        metrics.steps.add(1, attributes)
        length = self._clock.length(event)
        if length is not None:
            metrics.step.record(length, attributes)
        metrics.ranks.set(event.num_ranks, rank)
        for name, value in event.metrics.items():
            # The SDK logs a warning for each value that is not finite, which would be one in each step.
            if math.isfinite(value) and self._names.fits(name):
                metrics.reported.set(value, {**rank, "syncline.metric.name": name})

    @exports
    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        if event.is_discarded:
            self._metrics.discarded.add(1, self._attributes(event.source))
        more: Attributes = {
            "syncline.optimizer": event.optimizer,
            "syncline.is_discarded": event.is_discarded,
        }
        self._spans.add(event.source, "optimizer", event.began_at, event.ended_at, more)

    @exports
    def parameters_synced(self, event: ParametersSynced) -> None:
        record, rank = event.record, event.source.rank
        sent = {"syncline.rank": rank, "syncline.what": "parameters"}
        self._metrics.bytes.add(record.payload_bytes, sent)
        more: Attributes = {"syncline.what": "; ".join(record.what), "syncline.bytes": record.payload_bytes}
        self._spans.add(event.source, "parameter_sync", event.began_at, event.ended_at, more)

    @exports
    def call_ended(self, event: CallEnded) -> None:
        if has_done_something(event):
            always = is_of_checkpoints(event)
            self._spans.add_of_rank(event.rank, event.name, event.began_at, event.ended_at, always=always)

    @exports
    def ranks_changed(self, event: RanksChanged) -> None:
        rank = {"syncline.rank": event.rank}
        self._metrics.lost.add(event.num_lost, rank)
        self._metrics.ranks.set(event.num_ranks, rank)
        more: Attributes = {
            "syncline.step": event.step,
            "syncline.num_ranks": event.num_ranks,
            "syncline.num_lost": event.num_lost,
            "syncline.reason": event.reason,
        }
        self._spans.add_of_rank(event.rank, "ranks_changed", event.began_at, event.ended_at, more)

    @exports
    def rank_found_slow(self, event: RankFoundSlow) -> None:
        now, record = time.perf_counter(), event.record
        more: Attributes = {"syncline.slow_rank": record.rank, "syncline.words": str(record)}
        self._spans.add_of_rank(event.source.rank, "rank_found_slow", now, now, more)

    @exports
    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        outcome = {"syncline.outcome": event.outcome}
        self._metrics.diverged.add(1, {"syncline.rank": event.rank, **outcome})
        more: Attributes = {
            **outcome,
            "syncline.check": event.check,
            "syncline.tensor": event.tensor,
            "syncline.num_differing": event.num_differing,
        }
        error = "" if event.outcome == "repaired" else event.words
        self._spans.add_of_rank(event.rank, "replicas_diverged", event.at, event.at, more, error=error)


@dataclass(kw_only=True)
class _OpenStep:
    """A step that has begun. Its span ends when the next step of the module begins."""

    step: int
    span: Span | None
    """None if the step has no span."""
    context: Any
    """A context in which the span is the current one."""
    ended_at: float
    """When the last part of the step so far had ended."""


class _Spans:
    """The spans of the ranks of this process.

    Args:
        client: the module `opentelemetry.trace`.
        every: see `OpenTelemetry`.
    """

    def __init__(self, client: Any, every: int) -> None:
        self._client, self._every = client, every
        self._tracer = client.get_tracer(_SCOPE)
        # One offset for all spans, because a step has to begin before its parts, and end after them.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._open: dict[Source, _OpenStep] = {}
        self._of_rank: dict[int, Source] = {}
        """The module whose step began last on each rank."""

    def begin_step(self, source: Source, step: int, began_at: float) -> None:
        """Begin the span of a step, if the step has not begun yet. End that of the former step.

        Args:
            source: the module.
            step: the number of the step.
            began_at: when its first part began.
        """
        former = self._open.get(source)
        if former is not None and former.step == step:
            return
        if former is not None:
            began_at = former.ended_at  # the time in between is for the data of this step
            self._end(former)
        span = context = None
        if (step - 1) % self._every == 0:
            attributes = {
                "syncline.rank": source.rank,
                "syncline.module": source.module,
                "syncline.step": step,
            }
            span = self._tracer.start_span(
                "syncline.step", attributes=attributes, start_time=self._unix_ns(began_at)
            )
            context = self._client.set_span_in_context(span)
        self._open[source] = _OpenStep(step=step, span=span, context=context, ended_at=began_at)
        self._of_rank[source.rank] = source

    def add(
        self, source: Source, name: str, began_at: float, ended_at: float, more: Attributes | None = None
    ) -> Any:
        """Add a part of the present step. Return a context in which it is the current span; None if it has no span."""
        step = self._open.get(source)
        if step is None:
            return None
        step.ended_at = max(step.ended_at, ended_at)
        if step.span is None or not step.span.is_recording():
            return None
        attributes = {"syncline.rank": source.rank, **(more or {})}
        return self._add(name, began_at, ended_at, attributes, step.context)

    def add_backward(self, event: BackwardEnded) -> None:
        """Add a backward, with its buckets and the waits for them."""
        more = {"syncline.is_synchronized": event.is_synchronized}
        context = self.add(event.source, "backward", event.began_at, event.ended_at, more)
        if context is None or not event.is_synchronized:
            return
        sizes = {one.index: one.payload_bytes for one in event.record().buckets}
        for index, sent, began, ended in event.buckets:
            attributes = {"syncline.rank": event.source.rank, "syncline.bucket": index}
            sized = {**attributes, "syncline.bytes": sizes.get(index, 0)}
            self._add("bucket", sent, ended, sized, context)
            if ended > began:
                self._add("wait", began, ended, attributes, context)

    def add_of_rank(
        self,
        rank: int,
        name: str,
        began_at: float,
        ended_at: float,
        more: Attributes | None = None,
        *,
        always: bool = True,
        error: str = "",
    ) -> None:
        """Add a span of a rank that belongs to no module.

        Args:
            rank: the rank.
            name: the name.
            began_at: when it began.
            ended_at: when it ended.
            more: attributes beside the rank.
            always: whether it has a span although the present step has none.
            error: the text of an error, which becomes the status of the span; empty if there is none.
        """
        source = self._of_rank.get(rank)
        step = None if source is None else self._open.get(source)
        if step is not None:
            step.ended_at = max(step.ended_at, ended_at)
        has_span = step is not None and step.span is not None
        if has_span or always:
            attributes = {"syncline.rank": rank, **(more or {})}
            context = step.context if step is not None else None
            self._add(name, began_at, ended_at, attributes, context, error=error)

    def _add(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes,
        context: Any,
        error: str = "",
    ) -> Any:
        span = self._tracer.start_span(
            f"syncline.{name}", context=context, attributes=attributes, start_time=self._unix_ns(began_at)
        )
        if error:
            span.set_status(self._client.StatusCode.ERROR, error)
        span.end(self._unix_ns(ended_at))
        return self._client.set_span_in_context(span, context)

    def _end(self, step: _OpenStep) -> None:
        if step.span is not None:
            step.span.end(self._unix_ns(step.ended_at))

    def _unix_ns(self, at: float) -> int:
        """Return a time of `time.perf_counter` in nanoseconds since the epoch."""
        return self._offset_ns + int(1e9 * at)

    def end_all(self) -> None:
        """End the spans of the steps that have begun."""
        found, self._open = self._open, {}
        for step in found.values():
            self._end(step)


class _Metrics:
    """The instruments of a meter.

    Args:
        meter: the meter.
    """

    def __init__(self, meter: Any) -> None:
        self.step = meter.create_histogram("syncline.step.duration", "s", "Length of a step")
        self.wait = meter.create_histogram(
            "syncline.wait.duration", "s", "Wait of a backward for its buckets"
        )
        self.steps = meter.create_counter("syncline.steps", "{step}", "Steps")
        self.discarded = meter.create_counter(
            "syncline.steps.discarded", "{step}", "Optimizer steps that were not made"
        )
        self.bytes = meter.create_counter("syncline.sent", "By", "Bytes passed to the transport")
        self.lost = meter.create_counter("syncline.ranks.lost", "{rank}", "Ranks that were lost")
        self.diverged = meter.create_counter("syncline.divergences", "1", "How often replicas differed")
        self.ranks = meter.create_gauge("syncline.ranks", "{rank}", "Ranks that train together")
        self.reported = meter.create_gauge("syncline.metric", "1", "Last value given to ddp.report")
