"""The exporter for Prometheus, on prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncline import events
from syncline.checks import checked_kind, suggests_arguments
from syncline.exporters.base import MetricExporter, import_client

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""The bounds of the histograms: a wait can take 0.1 ms, and a save a minute."""

_MODULE = ("rank", "module")

_METRICS = {
    "step": ("Histogram", "step_seconds", "Length of a step", _MODULE),
    "wait": ("Histogram", "exposed_wait_seconds", "Wait of a backward for its buckets", _MODULE),
    "round": ("Histogram", "parameter_sync_seconds", "Length of a parameter sync of a strategy", _MODULE),
    "call": ("Histogram", "call_seconds", "Length of a call, such as a save", ("rank", "name")),
    "steps": ("Counter", "steps", "Steps", _MODULE),
    "discarded": ("Counter", "discarded_steps", "Optimizer steps that were not made", _MODULE),
    "bytes": ("Counter", "sent_bytes", "Bytes passed to the transport", ("rank", "what")),
    "lost": ("Counter", "ranks_lost", "Ranks that were lost, as seen by this rank", ("rank",)),
    "slow": ("Counter", "slow_ranks", "How often a rank was found slow", ("rank", "slow_rank")),
    "diverged": ("Counter", "divergences", "How often replicas differed", ("rank", "outcome")),
    "number": ("Gauge", "step_number", "Number of the last step", _MODULE),
    "ranks": ("Gauge", "ranks", "Ranks that train together", ("rank",)),
    "reported": ("Gauge", "metric", "Last value given to ddp.report", ("rank", "name")),
}

_VERBS = {"Histogram": "observe", "Counter": "inc", "Gauge": "set"}


class Prometheus(MetricExporter):
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
        client = import_client("prometheus_client", exporter="Prometheus")
        registry = client.REGISTRY if registry is None else registry
        checked_kind("registry", registry, client.CollectorRegistry, "a CollectorRegistry")
        self._metrics: dict[str, Any] = {}
        for key, (kind, name, words, labels) in _METRICS.items():
            more = {"buckets": _SECONDS} if kind == "Histogram" else {}
            metric = getattr(client, kind)(f"syncline_{name}", words, labels, registry=registry, **more)
            self._metrics[key] = metric

    def _record(self, metric: str, value: float, labels: Mapping[str, str | int]) -> None:
        getattr(self._metrics[metric].labels(*labels.values()), _VERBS[_METRICS[metric][0]])(value)

    def ranks_changed(self, event: events.RanksChanged) -> None:
        for gauge in ("number", "ranks", "reported"):
            # This rank may have another number now, and its old series would stay as they are.
            self._metrics[gauge].clear()
        super().ranks_changed(event)
