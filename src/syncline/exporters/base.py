"""The common parts of exporters: import of a client library, its errors, lengths of steps, and counts of events."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from syncline import events
from syncline.user_code import warn_user

# A monitoring system keeps a series for each label. So only the first names are labels.
MAX_MODULES = 32
"""The number of wrapped modules with labels of their own. A program that wraps modules in a loop can have many."""

MAX_METRICS = 64
"""The number of names of `ddp.report` that are exported as series of their own."""

_GUARDED = {name for name in vars(events.Observer) if not name.startswith("_")} - {"start"}
"""The methods of an exporter whose errors end the exporter, and not the program."""


def import_client(module: str, *, exporter: str) -> Any:
    """Import a module of a client library, and return it.

    Args:
        module: the name of the module.
        exporter: the exporter that needs it. The extra of Syncline that installs the client library has its name.

    Raises:
        ImportError: the client library is not installed, or its import fails.

    Examples:
        >>> try:
        ...     import_client("no_such_module", exporter="X")
        ... except ImportError as error:
        ...     print(error)
        sl.exporters.X needs a package (No module named 'no_such_module'): pip install 'syncline[x]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"pip install 'syncline[{exporter.lower()}]'"
        raise ImportError(f"sl.exporters.{exporter} needs a package ({error}): {remedy}") from error


class Exporter(events.Observer):
    """An observer that passes events to a client library.

    A run must not end because its monitoring fails. So if a subclass raises an error when it receives an event or is
    stopped, the exporter warns once and stops, and training continues.
    """

    def __init_subclass__(cls) -> None:
        for name in _GUARDED & vars(cls).keys():
            setattr(cls, name, _or_give_up(vars(cls)[name]))

    def __init__(self) -> None:
        self._has_failed = False
        self._ended_at: dict[events.Source, float] = {}
        """The time at which the last step of each module ended."""

    def _give_up(self, error: Exception) -> None:
        """Warn of an error of the client library, and stop."""
        if self._has_failed:
            return
        self._has_failed = True
        self.stop()
        warn_user(
            f"sl.exporters.{type(self).__name__} stops, because of {type(error).__name__}: {error}. Training continues"
        )

    def _step_seconds(self, event: events.BackwardEnded) -> float | None:
        """Return the time from the end of the last step to the backward that ends this one; None for the first step."""
        began_at = self._ended_at.get(event.source)
        self._ended_at[event.source] = event.ended_at
        return None if began_at is None else event.ended_at - began_at


def _or_give_up(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def call(exporter: Exporter, *event: Any) -> None:
        try:
            method(exporter, *event)
        except Exception as error:
            exporter._give_up(error)

    return call


class MetricExporter(Exporter):
    """An exporter that passes numbers to a client library, by `_record`."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: set[str] = set()
        self._names: set[str] = set()
        self._sent: dict[events.Source, tuple[int, int]] = {}
        """The layout of each module's buckets, and their bytes, kept so that they are not computed in each step."""

    def _record(self, metric: str, value: float, labels: Mapping[str, str | int]) -> None:
        """Pass a number to the client library.

        Args:
            metric: the name of the metric, as in the calls below.
            value: a length for a histogram, an increment for a counter, a value for a gauge.
            labels: the labels of the series.
        """
        raise NotImplementedError

    def _labels(self, source: events.Source) -> dict[str, str | int]:
        module = source.module if _fits(source.module, self._modules, MAX_MODULES) else "other"
        return {"rank": source.rank, "module": module}

    def _record_bytes(self, source: events.Source, what: str, num_bytes: int) -> None:
        self._record("bytes", num_bytes, {"rank": source.rank, "what": what})

    def _gradient_bytes(self, event: events.BackwardEnded) -> int:
        if self._sent.get(event.source, (None,))[0] != event.layout:
            num_bytes = sum(one.payload_bytes for one in event.record().buckets)
            self._sent[event.source] = event.layout, num_bytes
        return self._sent[event.source][1]

    def forward_ended(self, event: events.ForwardEnded) -> None:
        if event.buffers is not None:
            self._record_bytes(event.source, "buffers", event.buffers.payload_bytes)

    def backward_ended(self, event: events.BackwardEnded) -> None:
        rank, labels = event.source.rank, self._labels(event.source)
        if event.is_synchronized:
            self._record("wait", sum(ended - began for _, _, began, ended in event.buckets), labels)
            self._record_bytes(event.source, "gradients", self._gradient_bytes(event))
        if not event.ends_step:
            return
        self._record("steps", 1, labels)
        self._record("number", event.step, labels)
        self._record("ranks", event.num_ranks, {"rank": rank})
        if (seconds := self._step_seconds(event)) is not None:
            self._record("step", seconds, labels)
        for name, value in event.metrics.items():
            if _fits(name, self._names, MAX_METRICS):
                self._record("reported", value, {"rank": rank, "metric.name": name})

    def optimizer_stepped(self, event: events.OptimizerStepped) -> None:
        if event.is_discarded:
            self._record("discarded", 1, self._labels(event.source))

    def parameters_synced(self, event: events.ParametersSynced) -> None:
        self._record("round", event.ended_at - event.began_at, self._labels(event.source))
        self._record_bytes(event.source, "parameters", event.record.payload_bytes)

    def call_ended(self, event: events.CallEnded) -> None:
        self._record("call", event.ended_at - event.began_at, {"rank": event.rank, "name": event.name})

    def ranks_changed(self, event: events.RanksChanged) -> None:
        self._record("ranks", event.num_ranks, {"rank": event.rank})
        self._record("lost", event.num_lost, {"rank": event.rank})

    def rank_found_slow(self, event: events.RankFoundSlow) -> None:
        self._record("slow", 1, {"rank": event.source.rank, "slow_rank": event.record.rank})

    def replicas_diverged(self, event: events.ReplicasDiverged) -> None:
        self._record("diverged", 1, {"rank": event.rank, "outcome": event.outcome})


def _fits(name: str, known: set[str], most: int) -> bool:
    """Return whether a name is one of the first names.

    Examples:
        >>> known = set()
        >>> [_fits(name, known, 2) for name in ("a", "b", "c", "a")]
        [True, True, False, True]
    """
    if len(known) < most:
        known.add(name)
    return name in known
