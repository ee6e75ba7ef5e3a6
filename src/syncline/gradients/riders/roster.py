"""All riders of one reducer, by name and in the order in which they conclude. Add a new rider to this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from syncline.gradients.options import GradientOptions
from syncline.gradients.riders.base import Rider, Riders
from syncline.gradients.riders.differences import Forwards, SameData, Settings
from syncline.gradients.riders.items import Items
from syncline.gradients.riders.metrics import Metrics
from syncline.gradients.riders.missing import MissingGradients, StaticGraph
from syncline.gradients.riders.nonfinite import NonFinite, NonFiniteWatch
from syncline.gradients.riders.nonfinite_notice import NonFiniteNotice
from syncline.gradients.riders.replica_look import ReplicaLook
from syncline.gradients.riders.replica_watch import Replicas
from syncline.gradients.riders.requests import Newcomers, Stop
from syncline.gradients.usage import StaticUsage
from syncline.transport.base import Transport


class Roster(Riders):
    """All riders of a reducer, as attributes and in their order. Every rank has the same riders.

    Args:
        names: names of all parameters, by index.
        transport: the transport between the ranks.
        options: the options of gradient synchronization.
        static: the number of gradients of each parameter under `static_graph`. Pass None without `static_graph`.
        gradients: a function that returns the `.grad` of each parameter. With `sharded=True` these are stand-ins.
        former: the former riders. The new riders take over their state, because the module or its group has changed.
            Pass None at first.
    """

    def __init__(
        self,
        names: Sequence[str],
        transport: Transport,
        options: GradientOptions,
        *,
        static: StaticUsage | None,
        gradients: Callable[[], Iterable[Tensor | None]],
        former: Roster | None = None,
    ) -> None:
        self.stop: Stop = Stop() if former is None else former.stop
        self.newcomers: Newcomers = Newcomers() if former is None else former.newcomers
        self.forwards: Forwards = Forwards() if former is None else former.forwards
        self.settings: Settings = Settings() if former is None else former.settings
        self.metrics: Metrics = Metrics() if former is None else former.metrics
        self.replicas: Replicas = Replicas() if former is None else former.replicas
        self.same_data: SameData = SameData() if former is None else former.same_data
        self.items = Items()
        self.missing = MissingGradients(names, are_allowed=options.allow_unused)
        self.nonfinite = NonFinite()
        if options.on_nonfinite == "warn":
            self.nonfinite = NonFiniteNotice(names, transport)
        elif options.on_nonfinite != "ignore":
            self.nonfinite = NonFiniteWatch(options.on_nonfinite, names, gradients, transport)
        if former is not None:
            self.nonfinite.continues(former.nonfinite)
        riders: list[Rider] = [
            self.stop,
            self.newcomers,
            self.same_data,
            self.forwards,
            self.settings,
            self.missing,
        ]
        self.static_graph: StaticGraph | None = None
        if static is not None:
            self.static_graph = StaticGraph(names, static)
            riders.append(self.static_graph)
        riders += [self.items, self.metrics]
        if options.on_nonfinite != "ignore":
            riders.append(self.nonfinite)
        self.look: ReplicaLook = ReplicaLook() if former is None else former.look
        if options.compares_replicas:
            riders.append(self.replicas)
        elif options.looks_at_replicas:
            riders.append(self.look)
        super().__init__(riders, transport)
