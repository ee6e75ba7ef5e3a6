"""What all exporters share: the import of a client library, its errors, the times of steps, and limits on names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from syncline.events import BackwardEnded, CallEnded, Observer, Source
from syncline.user_code import warn_user

E = TypeVar("E")
X = TypeVar("X", bound="Exporter")

OTHER = "other"
"""The label of all names beyond the limit of `Names`."""


def import_client(module: str, *, exporter: str, package: str, extra: str) -> Any:
    """Import a module of a client library, and return it.

    Args:
        module: the name of the module.
        exporter: the exporter that needs it.
        package: the package that has the module.
        extra: the extra of Syncline that installs the package.

    Raises:
        ImportError: the package is not installed, or its import fails.

    Examples:
        >>> try:
        ...     import_client("no_such_module", exporter="X", package="no-such-package", extra="x")
        ... except ImportError as error:
        ...     print(error)
        sl.exporters.X needs the package no-such-package (No module named 'no_such_module'): pip install 'syncline[x]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"sl.exporters.{exporter} needs the package {package} ({error}): pip install 'syncline[{extra}]'"
        ) from error


class Exporter(Observer):
    """An observer that passes events to a client library.

    A run must not end because its monitoring fails. So if the library raises an error, the exporter warns once and
    stops, and training continues.
    """

    def __init__(self) -> None:
        self._has_failed = False

    def _give_up(self, error: Exception) -> None:
        """Warn of an error of the client library, and stop."""
        if self._has_failed:
            return
        self._has_failed = True
        self.stop()
        warn_user(
            f"sl.exporters.{type(self).__name__} stops, because of {type(error).__name__}: {error}. Training continues"
        )


def exports(receive: Callable[[X, E], None]) -> Callable[[X, E], None]:
    """Return a method of an exporter, whose errors end the exporter and not the program."""

    @wraps(receive)
    def receive_or_give_up(exporter: X, event: E) -> None:
        try:
            receive(exporter, event)
        except Exception as error:
            exporter._give_up(error)

    return receive_or_give_up


class StepClock:
    """The lengths of the steps of each wrapped module: from the end of one step's backward to the end of the next."""

    def __init__(self) -> None:
        self._ended_at: dict[Source, float] = {}

    def length(self, event: BackwardEnded) -> float | None:
        """Return the length of the step that ends with a backward, in seconds; None for the first step.

        Args:
            event: a backward with which a step ends.
        """
        former = self._ended_at.get(event.source)
        self._ended_at[event.source] = event.ended_at
        return None if former is None else event.ended_at - former


class BucketSizes:
    """The sizes of the buckets of each wrapped module. They are read again when the layout of the buckets changes."""

    def __init__(self) -> None:
        self._known: dict[Source, tuple[int, dict[int, int]]] = {}

    def of(self, event: BackwardEnded) -> dict[int, int]:
        """Return the bytes of each bucket of a backward, by the index of the bucket."""
        if not event.is_synchronized:
            return {}
        layout, sizes = self._known.get(event.source, (None, {}))
        if layout != event.layout:
            sizes = {one.index: one.payload_bytes for one in event.record().buckets}
            self._known[event.source] = (event.layout, sizes)
        return sizes


class Names:
    """Names that are used as labels: at most so many, because a monitoring system keeps a series for each of them.

    Examples:
        >>> names = Names(2)
        >>> [names.label(name) for name in ("a", "b", "c", "a")]
        ['a', 'b', 'other', 'a']
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def fits(self, name: str) -> bool:
        """Return whether a name is one of the first names."""
        if name not in self._known and len(self._known) < self._most:
            self._known.add(name)
        return name in self._known

    def label(self, name: str) -> str:
        """Return the name, or "other" if there are too many names."""
        return name if self.fits(name) else OTHER


MAX_MODULES = 32
"""The number of wrapped modules with labels of their own. A program that wraps modules in a loop can have many."""

MAX_METRICS = 64
"""The number of names of `ddp.report` that are exported as series of their own."""


def waited_seconds(event: BackwardEnded) -> float:
    """Return how long this rank waited for the buckets of a backward."""
    return sum(ended - began for _, _, began, ended in event.buckets)


_SHORTEST_SAVE_SECONDS = 0.0001


def is_of_checkpoints(event: CallEnded) -> bool:
    """Return whether a call is one of a Checkpointer."""
    return event.name.startswith("Checkpointer")


def has_done_something(event: CallEnded) -> bool:
    """Return whether a call counts. A Checkpointer also looks for a pending save when there is none."""
    return not is_of_checkpoints(event) or event.ended_at - event.began_at >= _SHORTEST_SAVE_SECONDS
