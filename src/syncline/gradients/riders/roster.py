"""All riders of one wrapper, by name and in the order in which they conclude. Add a new rider to this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from syncline.gradients.options import GradientOptions, OnNonFinite
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
    """All riders of a wrapper, as attributes and in their order. Every rank has the same riders.

    Args:
        on_nonfinite: the policy for gradients that are not finite.
    """

    def __init__(self, on_nonfinite: OnNonFinite) -> None:
        self.stop: Stop = Stop()
        self.newcomers: Newcomers = Newcomers()
        self.forwards: Forwards = Forwards()
        self.settings: Settings = Settings()
        self.metrics: Metrics = Metrics()
        self.replicas: Replicas = Replicas()
        self.look: ReplicaLook = ReplicaLook()
        self.same_data: SameData = SameData()
        self.items = Items()
        self.nonfinite = NonFinite()
        if on_nonfinite == "warn":
            self.nonfinite = NonFiniteNotice()
        elif on_nonfinite != "ignore":
            self.nonfinite = NonFiniteWatch(on_nonfinite)

    def use(
        self,
        names: Sequence[str],
        transport: Transport,
        options: GradientOptions,
        *,
        static: StaticUsage | None,
        gradients: Callable[[], Iterable[Tensor | None]],
    ) -> None:
        """Report about these parameters from now on.

        Args:
            names: names of all parameters, by index.
            transport: the transport between the ranks.
            options: the options of gradient synchronization.
            static: the number of gradients of each parameter under `static_graph`. Pass None without `static_graph`.
            gradients: a function that returns the `.grad` of each parameter. With `sharded=True` these are stand-ins.
        """
        self.missing = MissingGradients(names, are_allowed=options.allow_unused)
        self.nonfinite.use(names, transport, gradients)
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
        if options.compares_replicas:
            riders.append(self.replicas)
        elif options.looks_at_replicas:
            riders.append(self.look)
        self.arrange(riders, transport)
