"""Packages whose names are imported when they are asked for, so that a program waits only for what it uses."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_IMPORTING = threading.RLock()
"""Ranks may be threads: two that import modules of one package at once can make Python's import locks a deadlock."""


class _Face(ModuleType):
    """A package that imports the module of a name when the name is asked for the first time."""

    _module_of: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._module_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        module = self._module_of[name]
        with _IMPORTING:
            if module == self.__name__:
                found: Any = importlib.import_module(f"{module}.{name}")
            else:
                found = getattr(importlib.import_module(module), name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._module_of})


def hand_out(package: str, names: Mapping[str, Sequence[str]]) -> None:
    """Make names attributes of a package, each of which is imported when it is asked for.

    Args:
        package: the package's `__name__`.
        names: for each module, the names that it defines. Under the package's own name: modules right in it.
    """
    face = sys.modules[package]
    face.__class__ = _Face
    vars(face)["_module_of"] = {name: module for module, of_module in names.items() for name in of_module}
