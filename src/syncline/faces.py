"""Lazy imports: a package imports a public name only when a program uses it, so that programs start faster.

Such a package lists its public names once, as imports for type checkers:

    if TYPE_CHECKING:
        from syncline.data import DistributedSampler as DistributedSampler

    hand_out(__name__)

Python compiles these imports, but does not run them. `hand_out` reads the names and modules from the compiled code.
"""

from __future__ import annotations

import dis
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

_IMPORTING = threading.RLock()
"""A lock that is held during each import. Ranks can be threads. Without this lock, two of them could import modules of
one package at the same time, and wait forever for each other's import locks."""


class _Face(ModuleType):
    """A package that imports a public name when a program uses the name for the first time."""

    _module_of: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._module_of:
            text = f"module {self.__name__!r} has no attribute {name!r}{_meant(name, self._module_of)}"
            raise AttributeError(text, name=name, obj=self)
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

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle sends only plain modules by name. Ray and submitit send functions with it, which use packages.
        return importlib.import_module, (self.__name__,)


def hand_out(package: str) -> None:
    """Let a package import its public names when they are used, and set its `__all__`.

    The public names are those in the package's imports for type checkers. Call this function at the end of the
    package's `__init__`.

    Args:
        package: the `__name__` of the package.
    """
    face = sys.modules[package]
    root = package.partition(".")[0]
    imported = _imports_in(sys._getframe(1).f_code)
    module_of = {
        name: module for module, name in imported if module.partition(".")[0] == root and module != __name__
    }
    face.__class__ = _Face
    vars(face).update(_module_of=module_of, __all__=sorted(module_of))


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, which proposes the names with these capital letters.

    Examples:
        >>> _meant("DDP", ["DataParallel", "DistributedDataParallel"]), _meant("ddp", ["DistributedDataParallel"])
        ('. Did you mean DistributedDataParallel?', '')
    """
    found = [one for one in known if len(name) > 1 and "".join(filter(str.isupper, one)) == name]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _imports_in(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield a tuple (module, name) for every `from module import name` in compiled code."""
    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            yield module, instruction.argval
