"""The exporter for OpenTelemetry, on the API package. The program configures the SDK, and where it sends its data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncline import events
from syncline.checks import checked_count, suggests_arguments
from syncline.exporters.base import MetricExporter, import_client

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | bool | int | float]

_SCOPE = "syncline"

_RARE_CALLS = ("Checkpointer.save", "Checkpointer.load")


class OpenTelemetry(MetricExporter):
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
        self._spans = _Spans(import_client("opentelemetry.trace", exporter="OpenTelemetry"), every)
        meter = import_client("opentelemetry.metrics", exporter="OpenTelemetry").get_meter(_SCOPE)
        histogram, counter, gauge = meter.create_histogram, meter.create_counter, meter.create_gauge
        discarded = counter("syncline.steps.discarded", "{step}", "Optimizer steps that were not made")
        self._metrics = {
            "step": histogram("syncline.step.duration", "s", "Length of a step").record,
            "wait": histogram("syncline.wait.duration", "s", "Wait of a backward for its buckets").record,
            "steps": counter("syncline.steps", "{step}", "Steps").add,
            "discarded": discarded.add,
            "bytes": counter("syncline.sent", "By", "Bytes passed to the transport").add,
            "lost": counter("syncline.ranks.lost", "{rank}", "Ranks that were lost").add,
            "diverged": counter("syncline.divergences", "1", "How often replicas differed").add,
            "ranks": gauge("syncline.ranks", "{rank}", "Ranks that train together").set,
            "reported": gauge("syncline.metric", "1", "Last value given to ddp.report").set,
        }

    def stop(self) -> None:
        """Stop receiving events, and end the spans of the last steps."""
        super().stop()
        self._spans.end_all()

    def _record(self, metric: str, value: float, labels: Mapping[str, str | int]) -> None:
        # The SDK logs a warning for each value that is not finite, which would be one in each step.
        if metric in self._metrics and math.isfinite(value):
            self._metrics[metric](value, _named(labels))

    def forward_ended(self, event: events.ForwardEnded) -> None:
        super().forward_ended(event)
        if event.is_training:  # an evaluation can have thousands of forwards
            self._spans.begin_step(event.source, event.step, event.began_at)
            self._spans.add(event.source, "forward", event.began_at, event.ended_at, {})

    def backward_ended(self, event: events.BackwardEnded) -> None:
        super().backward_ended(event)
        spans, more = self._spans, {"is_synchronized": event.is_synchronized}
        spans.begin_step(event.source, event.step, event.began_at)
        backward = spans.add(event.source, "backward", event.began_at, event.ended_at, more)
        if backward is None:
            return
        for (index, sent, began, ended), one in zip(event.buckets, event.record().buckets, strict=True):
            bucket = {"bucket": index, "bytes": one.payload_bytes}
            spans.add(event.source, "bucket", sent, ended, bucket, inside=backward)
            if ended > began:
                spans.add(event.source, "wait", began, ended, {"bucket": index}, inside=backward)

    def optimizer_stepped(self, event: events.OptimizerStepped) -> None:
        super().optimizer_stepped(event)
        more: Attributes = {"optimizer": event.optimizer, "is_discarded": event.is_discarded}
        self._spans.add(event.source, "optimizer", event.began_at, event.ended_at, more)

    def parameters_synced(self, event: events.ParametersSynced) -> None:
        super().parameters_synced(event)
        more: Attributes = {"what": "; ".join(event.record.what), "bytes": event.record.payload_bytes}
        self._spans.add(event.source, "parameter_sync", event.began_at, event.ended_at, more)

    def call_ended(self, event: events.CallEnded) -> None:
        super().call_ended(event)
        is_rare = event.name in _RARE_CALLS
        self._spans.add(event.rank, event.name, event.began_at, event.ended_at, {}, is_rare=is_rare)

    def ranks_changed(self, event: events.RanksChanged) -> None:
        super().ranks_changed(event)
        names = ("step", "num_ranks", "num_lost", "reason")
        more = {name: getattr(event, name) for name in names}
        self._spans.add(event.rank, "ranks_changed", event.began_at, event.ended_at, more, is_rare=True)

    def rank_found_slow(self, event: events.RankFoundSlow) -> None:
        super().rank_found_slow(event)
        now, record = time.perf_counter(), event.record
        more: Attributes = {"slow_rank": record.rank, "words": str(record)}
        self._spans.add(event.source.rank, "rank_found_slow", now, now, more, is_rare=True)

    def replicas_diverged(self, event: events.ReplicasDiverged) -> None:
        super().replicas_diverged(event)
        names = ("outcome", "check", "tensor", "num_differing")
        more = {name: getattr(event, name) for name in names}
        error = "" if event.outcome == "repaired" else event.words
        self._spans.add(event.rank, "replicas_diverged", event.at, event.at, more, is_rare=True, error=error)


def _named(attributes: Attributes) -> Attributes:
    return {f"syncline.{name}": value for name, value in attributes.items()}


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
        self._steps: dict[events.Source, tuple[int, Span | None]] = {}
        """The number of the present step of each module, and its span; None if the step has none."""
        self._last: dict[int, Span | None] = {}
        """The span of the step that began last on each rank."""

    def begin_step(self, source: events.Source, number: int, began_at: float) -> None:
        """Begin the span of a step, and end that of the step before. Do nothing if the step has begun already.

        Args:
            source: the module.
            number: the number of the step.
            began_at: when its first part began.
        """
        present, span = self._steps.get(source, (None, None))
        if present == number:
            return
        if span is not None:
            span.end(self._unix_ns(began_at))
        span = None
        if (number - 1) % self._every == 0:
            attributes: Attributes = {"rank": source.rank, "module": source.module, "step": number}
            span = self._begin(None, "step", began_at, attributes)
        self._steps[source], self._last[source.rank] = (number, span), span

    def add(
        self,
        owner: events.Source | int,
        name: str,
        began_at: float,
        ended_at: float,
        more: Attributes,
        *,
        inside: Span | None = None,
        is_rare: bool = False,
        error: str = "",
    ) -> Span | None:
        """Add a part of the present step, and return its span; None if the step has no span.

        Args:
            owner: the module; or the rank, if the part belongs to no module.
            name: the name.
            began_at: when it began.
            ended_at: when it ended.
            more: attributes beside the rank.
            inside: the span that it is a part of; None for that of the step.
            is_rare: whether it has a span although the present step has none.
            error: the text of an error, which becomes the status of the span; empty if there is none.
        """
        if isinstance(owner, int):
            rank, step = owner, self._last.get(owner)
        else:
            rank, step = owner.rank, self._steps.get(owner, (0, None))[1]
        if step is None and not is_rare:
            return None
        span = self._begin(inside or step, name, began_at, {"rank": rank, **more})
        if error:
            span.set_status(self._client.StatusCode.ERROR, error)
        span.end(self._unix_ns(ended_at))
        return span

    def end_all(self) -> None:
        """End the spans of the steps that have begun."""
        for _, span in self._steps.values():
            if span is not None:
                span.end()
        self._steps, self._last = {}, {}

    def _begin(self, outer: Span | None, name: str, began_at: float, attributes: Attributes) -> Span:
        context = None if outer is None else self._client.set_span_in_context(outer)
        span: Span = self._tracer.start_span(
            f"syncline.{name}", context, attributes=_named(attributes), start_time=self._unix_ns(began_at)
        )
        return span

    def _unix_ns(self, at: float) -> int:
        """Return a time of `time.perf_counter` in nanoseconds since the epoch."""
        return self._offset_ns + int(1e9 * at)
