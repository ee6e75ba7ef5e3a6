"""The registry of what the library attaches to a user's modules, found by kind, and held only while it is in use.

A verb is called with a plain module or its parameters. It has to find the reducer, the guard of shared memory, or the
record of drifting replicas that belongs to them, without a wrapper at hand. This is the only place where the library
looks for such an object. It is in `session/` because gradients, sharded, checkpoint, verbs and ddp, which register or
search, are all above it, and nothing below needs it. It is not a part of the session: what is attached to a module
outlives `shutdown`.

The registry knows none of the kinds. A kind is the class of what is registered; the room of this class defines the
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
    """Objects by their class: a set of living ones, and those that belong to one module.

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
        """Register `one` under its class, without keeping it alive."""
        with self._lock:
            self._living.setdefault(type(one), weakref.WeakSet()).add(one)

    def living(self, kind: type[T]) -> list[T]:
        """Return the registered objects of exactly this class that are alive, in no particular order."""
        with self._lock:
            return list(self._living.get(kind, ()))

    def by_module(self, kind: type[T]) -> MutableMapping[nn.Module, T]:
        """Return the table of objects of this class by the module they belong to. An entry ends with its module."""
        with self._lock:
            return self._by_module.setdefault(kind, weakref.WeakKeyDictionary())


REGISTRY = Registry()
"""The registry of this process."""
