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
from types import CodeType
from typing import Any

_IMPORTING = threading.RLock()
"""A lock that is held during each import. Ranks can be threads. Without this lock, two of them could import modules of
one package at the same time, and wait forever for each other's import locks."""


def hand_out(package: str) -> None:
    """Let a package import its public names when they are used, and set its `__all__`.

    The public names are those in the package's imports for type checkers. Call this function at the end of the
    package's `__init__`.

    Args:
        package: the `__name__` of the package.
    """
    face = vars(sys.modules[package])
    root = package.partition(".")[0]
    imported = _imports_in(sys._getframe(1).f_code)
    module_of = {
        name: module for module, name in imported if module.partition(".")[0] == root and module != __name__
    }

    def get(name: str) -> Any:
        if name not in module_of:
            text = f"module {package!r} has no attribute {name!r}{_meant(name, module_of)}"
            raise AttributeError(text, name=name, obj=sys.modules[package])
        module = module_of[name]
        with _IMPORTING:
            if module == package:
                found: Any = importlib.import_module(f"{module}.{name}")
            else:
                found = getattr(importlib.import_module(module), name)
        face[name] = found
        return found

    # The module stays a plain one, because cloudpickle sends only such modules by name. Ray and submitit send functions
    # with it, which use packages.
    face.update(__getattr__=get, __dir__=lambda: sorted({*face, *module_of}), __all__=sorted(module_of))


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
