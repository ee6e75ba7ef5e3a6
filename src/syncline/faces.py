"""Packages that import a name when it is first used, so that a program waits only for the modules that it uses."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_IMPORTING = threading.RLock()
"""Held during an import. Without it, two ranks that are threads could import modules of one package at the same time,
and wait for each other's import locks forever."""


class _Face(ModuleType):
    """A package that imports the module of a name when the name is used for the first time."""

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
    """Add names to a package as attributes. Each name is imported when it is first used.

    Args:
        package: the `__name__` of the package.
        names: a mapping from each module to the names that it defines. The entry of the package lists its submodules.
    """
    face = sys.modules[package]
    face.__class__ = _Face
    vars(face)["_module_of"] = {name: module for module, of_module in names.items() for name in of_module}
