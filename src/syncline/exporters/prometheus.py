"""The exporter for Prometheus, on prometheus_client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from syncline.checks import checked_kind
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
    waited_seconds,
)
from syncline.suggestions import suggests_arguments

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""The bounds of the histograms: a wait can take 0.1 ms, and a save a minute."""


class Prometheus(Exporter):
    """An observer that keeps metrics of this process for Prometheus, such as a histogram of the lengths of steps.

    Start it on all ranks, as each observer: by `start()` or in a `with` block. Then serve the registry, for example by
    `prometheus_client.start_http_server(8000 + sl.world().local_rank)`. Each rank exports its own metrics, with its
    number in the label `rank`. docs/guides/exporters.md lists the metrics.

    The number of series is bounded: labels are the rank, at most 32 wrapped modules, at most 64 names of `ddp.report`,
    and the functions of Syncline.

    If prometheus_client raises an error, the exporter warns once and stops. Training continues.

    Args:
        registry: a registry of prometheus_client; None for its default registry. A registry takes one exporter.

    Raises:
        ImportError: prometheus_client is not installed.
        TypeError, ValueError: `registry` is no registry, or has these metrics already.

    Examples:
        >>> import prometheus_client, torch, syncline as sl
        >>> registry = prometheus_client.CollectorRegistry()
        >>> class Exported(torch.nn.Linear):
        ...     pass
        >>> ddp = sl.DistributedDataParallel(Exported(2, 1))
        >>> with sl.exporters.Prometheus(registry):
        ...     ddp(torch.ones(1, 2)).sum().backward()
        >>> registry.get_sample_value("syncline_steps_total", {"rank": "0", "module": "Exported"})
        1.0
    """

    @suggests_arguments
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        client = import_client(
            "prometheus_client", exporter="Prometheus", package="prometheus_client", extra="prometheus"
        )
        if registry is None:
            registry = client.REGISTRY
        checked_kind("registry", registry, client.CollectorRegistry, "a CollectorRegistry")
        try:
            self._metrics = _Metrics(client, registry)
        except ValueError as error:
            raise ValueError(
                f"expected registry to have no metrics of Syncline, got one that has them ({error}). Use one "
                "sl.exporters.Prometheus for each registry, and start it again instead of making another one"
            ) from error
        self._clock, self._sizes = StepClock(), BucketSizes()
        self._modules, self._names = Names(MAX_MODULES), Names(MAX_METRICS)

    def _labels(self, source: Source) -> tuple[int, str]:
        return source.rank, self._modules.label(source.module)

    @exports
    def forward_ended(self, event: ForwardEnded) -> None:
        if event.buffers is not None:
            self._metrics.bytes.labels(event.source.rank, "buffers").inc(event.buffers.payload_bytes)

    @exports
    def backward_ended(self, event: BackwardEnded) -> None:
        metrics, rank, labels = self._metrics, event.source.rank, self._labels(event.source)
        if event.is_synchronized:
            metrics.wait.labels(*labels).observe(waited_seconds(event))
            metrics.bytes.labels(rank, "gradients").inc(sum(self._sizes.of(event).values()))
        if not event.ends_step:
            return
        metrics.steps.labels(*labels).inc()
        length = self._clock.length(event)
        if length is not None:
            metrics.step.labels(*labels).observe(length)
        metrics.number.labels(*labels).set(event.step)
        metrics.ranks.labels(rank).set(event.num_ranks)
        for name, value in event.metrics.items():
            if self._names.fits(name):
                metrics.reported.labels(rank, name).set(value)

    @exports
    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        if event.is_discarded:
            self._metrics.discarded.labels(*self._labels(event.source)).inc()

    @exports
    def parameters_synced(self, event: ParametersSynced) -> None:
        self._metrics.round.labels(*self._labels(event.source)).observe(event.ended_at - event.began_at)
        self._metrics.bytes.labels(event.source.rank, "parameters").inc(event.record.payload_bytes)

    @exports
    def call_ended(self, event: CallEnded) -> None:
        if has_done_something(event):
            self._metrics.call.labels(event.rank, event.name).observe(event.ended_at - event.began_at)

    @exports
    def ranks_changed(self, event: RanksChanged) -> None:
        metrics = self._metrics
        for gauge in (metrics.number, metrics.ranks, metrics.reported):
            gauge.clear()  # this rank may have another number now, and its old series would stay as they are
        metrics.ranks.labels(event.rank).set(event.num_ranks)
        metrics.lost.labels(event.rank).inc(event.num_lost)

    @exports
    def rank_found_slow(self, event: RankFoundSlow) -> None:
        self._metrics.slow.labels(event.source.rank, event.record.rank).inc()

    @exports
    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        self._metrics.diverged.labels(event.rank, event.outcome).inc()


class _Metrics:
    """The metrics in a registry.

    Args:
        client: the module prometheus_client.
        registry: the registry.

    Raises:
        ValueError: the registry has them already.
    """

    def __init__(self, client: Any, registry: CollectorRegistry) -> None:
        def made(kind: str, name: str, words: str, labels: Sequence[str], **settings: Any) -> Any:
            return getattr(client, kind)(f"syncline_{name}", words, labels, registry=registry, **settings)

        def histogram(name: str, words: str, labels: Sequence[str]) -> Any:
            return made("Histogram", name, words, labels, buckets=_SECONDS)

        module = ("rank", "module")
        self.step = histogram("step_seconds", "Length of a step", module)
        self.wait = histogram("exposed_wait_seconds", "Wait of a backward for its buckets", module)
        self.round = histogram("parameter_sync_seconds", "Length of a parameter sync of a strategy", module)
        self.call = histogram("call_seconds", "Length of a call, such as a save", ("rank", "name"))
        self.steps = made("Counter", "steps", "Steps", module)
        self.discarded = made("Counter", "discarded_steps", "Optimizer steps that were not made", module)
        self.bytes = made("Counter", "sent_bytes", "Bytes passed to the transport", ("rank", "what"))
        self.lost = made("Counter", "ranks_lost", "Ranks that were lost, as seen by this rank", ("rank",))
        self.slow = made("Counter", "slow_ranks", "How often a rank was found slow", ("rank", "slow_rank"))
        self.diverged = made("Counter", "divergences", "How often replicas differed", ("rank", "outcome"))
        self.number = made("Gauge", "step_number", "Number of the last step", module)
        self.ranks = made("Gauge", "ranks", "Ranks that train together", ("rank",))
        self.reported = made("Gauge", "metric", "Last value given to ddp.report", ("rank", "name"))
