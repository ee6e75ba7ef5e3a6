"""The registry of the objects that the library attaches to a user's modules.

A verb (a function such as `sl.average_`) takes a plain module or its parameters, not only a wrapper. The verb has to
find the reducer, the guard of shared memory, or the record of drifting replicas that belongs to the module. It searches
for such an object only in this registry. The registry is in `session/`, because all packages that register objects or
search for them (gradients, sharded, checkpoint, verbs and ddp) import `session/`. The registry is not a part of the
session: attached objects outlive `shutdown`.

The registry finds objects by their class and imports none of these classes. The package that defines a class also
defines the search for its objects (`reducers_of`, `one_copy_of`, `divergences_around`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class Registry:
    """A registry that finds objects by their class. An object is registered on its own, or as the object of one module.

    Examples:
        >>> from torch import nn
        >>> registry, module = Registry(), nn.Linear(2, 1)
        >>> registry.by_module(str)[module] = "a note"
        >>> registry.by_module(str).get(module), registry.by_module(int).get(module)
        ('a note', None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # ranks may be threads
        self._living: dict[type, weakref.WeakSet[Any]] = {}
        self._by_module: dict[type, weakref.WeakKeyDictionary[nn.Module, Any]] = {}

    def add(self, one: object) -> None:
        """Register the object `one` under its class. The registry does not keep the object alive."""
        with self._lock:
            self._living.setdefault(type(one), weakref.WeakSet()).add(one)

    def living(self, kind: type[T]) -> list[T]:
        """Return all living objects that `add` has registered under exactly this class, in no particular order."""
        with self._lock:
            return list(self._living.get(kind, ()))

    def by_module(self, kind: type[T]) -> MutableMapping[nn.Module, T]:
        """Return the table that maps a module to its object of this class. Entries of deleted modules vanish."""
        with self._lock:
            return self._by_module.setdefault(kind, weakref.WeakKeyDictionary())


REGISTRY = Registry()
"""The registry of this process."""
