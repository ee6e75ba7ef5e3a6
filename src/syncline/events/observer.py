"""Observers, which receive the events of this process.

An event costs nothing if no observer wants it: a place in the code that could emit an event first looks whether the
tuple of its receivers is empty, and creates the event only if it is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar

from syncline.events.kinds import (
    BackwardEnded,
    BucketReduced,
    BucketSent,
    CallEnded,
    ForwardEnded,
    GradientReady,
    OptimizerStepped,
    ParametersSynced,
    PlaceSeen,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
)
from syncline.user_code import calling

E = TypeVar("E")


class Observer:
    """A base class for objects that receive events. Each method receives one kind of event. These methods do nothing.

    Override the methods for the events that you want. Others cost nothing. A method is called at once, on the thread on
    which the event happened, so it should return soon, and must not call a collective. An error that it raises is
    raised in training.

    `start` and `stop` begin and end the calls. An observer is also a context manager. Events of all ranks in this
    process are received, which is one rank unless ranks are threads (`syncline.testing`). `sl.exporters` has observers
    for TensorBoard, OpenTelemetry and Prometheus.

    Examples:
        >>> import torch, syncline as sl
        >>> class Printer(sl.Observer):
        ...     def backward_ended(self, event):
        ...         print(f"step {event.step}: {event.record().num_gradients} gradients")
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with Printer():
        ...     ddp(torch.ones(1, 2)).sum().backward()
        step 1: 2 gradients
    """

    def forward_ended(self, event: ForwardEnded) -> None:
        """The forward of a wrapped module has ended."""

    def gradient_ready(self, event: GradientReady) -> None:
        """The gradient of one parameter is ready. A model can have thousands of these in a step."""

    def bucket_sent(self, event: BucketSent) -> None:
        """The reduction of a bucket of gradients has started."""

    def bucket_reduced(self, event: BucketReduced) -> None:
        """This rank has the result of a bucket."""

    def backward_ended(self, event: BackwardEnded) -> None:
        """A backward has ended, and `.grad` holds the result."""

    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        """An attached optimizer has stepped, or has discarded its step."""

    def parameters_synced(self, event: ParametersSynced) -> None:
        """The actions of a strategy have been carried out."""

    def call_ended(self, event: CallEnded) -> None:
        """A function of Syncline that synchronizes without a backward has ended."""

    def ranks_changed(self, event: RanksChanged) -> None:
        """The ranks of a `sl.steps` loop have changed."""

    def rank_found_slow(self, event: RankFoundSlow) -> None:
        """A rank is slow in many steps."""

    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        """A check has found values that differ between ranks although they must be equal."""

    def place_seen(self, event: PlaceSeen) -> None:
        """The place of this rank was seen. This runs on a thread of Syncline, and its errors are ignored."""

    def start(self) -> Self:
        """Begin to receive events. Return the observer."""
        OBSERVERS.add(self)
        return self

    def stop(self) -> None:
        """Stop receiving events. Do nothing if the observer has not started, or has stopped already."""
        OBSERVERS.remove(self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()


Receivers = tuple[Callable[[E], None], ...]
"""The methods that receive one kind of event."""


class Observers:
    """The observers of this process. For each kind of event there is a tuple of the methods that receive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Observer, ...] = ()
        self.forward_ended: Receivers[ForwardEnded] = ()
        self.gradient_ready: Receivers[GradientReady] = ()
        self.bucket_sent: Receivers[BucketSent] = ()
        self.bucket_reduced: Receivers[BucketReduced] = ()
        self.backward_ended: Receivers[BackwardEnded] = ()
        self.optimizer_stepped: Receivers[OptimizerStepped] = ()
        self.parameters_synced: Receivers[ParametersSynced] = ()
        self.call_ended: Receivers[CallEnded] = ()
        self.ranks_changed: Receivers[RanksChanged] = ()
        self.rank_found_slow: Receivers[RankFoundSlow] = ()
        self.replicas_diverged: Receivers[ReplicasDiverged] = ()
        self.place_seen: Receivers[PlaceSeen] = ()

    def add(self, observer: Observer) -> None:
        """Let an observer receive events. Do nothing if it does already."""
        with self._lock:
            if not any(one is observer for one in self._all):
                self._use((*self._all, observer))

    def remove(self, observer: Observer) -> None:
        """Let an observer receive no more events."""
        with self._lock:
            self._use(tuple(one for one in self._all if one is not observer))

    def _use(self, observers: tuple[Observer, ...]) -> None:
        for name in KINDS:
            unchanged = getattr(Observer, name)
            found = (getattr(one, name) for one in observers)
            wanted = (one for one in found if getattr(one, "__func__", one) is not unchanged)
            setattr(self, name, tuple(map(_marked, wanted)))
        self._all = observers


KINDS = tuple(name for name in vars(Observers()) if not name.startswith("_"))
"""The names of all kinds of events: the methods of `Observer`."""

OBSERVERS = Observers()
"""The observers of this process."""


def emit(receivers: Iterable[Callable[[E], None]], event: E) -> None:
    """Pass an event to its receivers.

    Examples:
        >>> emit([print], "an event")
        an event
    """
    for receive in receivers:
        receive(event)


_NOT_OBSERVED: AbstractContextManager[None] = nullcontext()


def called(name: str, rank: int) -> AbstractContextManager[None]:
    """Return a context that emits a `CallEnded` when it is left without an error, if an observer wants it.

    Args:
        name: the name of the function of Syncline that runs in the context.
        rank: the rank.
    """
    return _timed(name, rank) if OBSERVERS.call_ended else _NOT_OBSERVED


@contextmanager
def _timed(name: str, rank: int) -> Iterator[None]:
    began_at = perf_counter()
    yield
    emit(OBSERVERS.call_ended, CallEnded(rank, name, began_at, perf_counter()))


def _marked(receive: Any) -> Callable[[Any], None]:
    """Return a receiver. An error of a user's observer is marked as an error of user code."""
    if str(getattr(receive, "__module__", "")).startswith("syncline."):
        return receive  # type: ignore[no-any-return]
    name = getattr(receive, "__name__", repr(receive))
    words = f"{name}() of {type(getattr(receive, '__self__', receive)).__name__}"

    def receive_marked(event: Any) -> None:
        with calling(words):
            receive(event)

    return receive_marked
