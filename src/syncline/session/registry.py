"""The registry of the objects that the library attaches to a user's modules.

A verb is called with a plain module or its parameters, not with a wrapper. The verb has to find the reducer, the guard
of shared memory, or the record of drifting replicas that belongs to the module. It searches for such an object only
here. The registry is in `session/`, because the packages that register or search (gradients, sharded, checkpoint, verbs
and ddp) are all above `session/`. The registry is not a part of the session: attached objects outlive `shutdown`.

The registry finds objects by their class and imports none of these classes. The package of a class defines the
search (`reducers_of`, `one_copy_of`, `divergences_around`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class Registry:
    """Objects by their class. An object is registered alone, or as the object of one module.

    Example:
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
        """Register `one` under its class. The registry does not keep the object alive."""
        with self._lock:
            self._living.setdefault(type(one), weakref.WeakSet()).add(one)

    def living(self, kind: type[T]) -> list[T]:
        """Return the registered objects of exactly this class that are alive, in no particular order."""
        with self._lock:
            return list(self._living.get(kind, ()))

    def by_module(self, kind: type[T]) -> MutableMapping[nn.Module, T]:
        """Return the table of objects of this class, by module. An entry is removed when its module is deleted."""
        with self._lock:
            return self._by_module.setdefault(kind, weakref.WeakKeyDictionary())


REGISTRY = Registry()
"""The registry of this process."""
