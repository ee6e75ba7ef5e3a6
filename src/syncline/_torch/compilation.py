"""torch.compile: keep it out of the code that synchronizes. The module inside the wrapper is still compiled."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from syncline._torch.lookup import lookup

__all__ = ["NotTraced", "import_compiler", "is_compiler_loaded"]


_COMPILER = "torch._dynamo"

_is_kept_out = False


def is_compiler_loaded() -> bool:
    """Return whether the compiler has been imported. Importing it takes seconds."""
    return _COMPILER in sys.modules


def import_compiler() -> None:
    """Import the compiler now; torch would do so at an optimizer's first step and for activation checkpoints."""
    importlib.import_module(_COMPILER)


class NotTraced:
    """A method that torch.compile does not trace, though it compiles the functions that the method calls.

    Like `torch.compiler.disable(recursive=False)`, but without an import of the compiler in programs that do not use
    it. The compiler looks the method up before it decides whether to trace it, so the lookup configures the compiler.

    Args:
        function: the method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self._function
        _keep_out_of_compilation()
        return MethodType(self._function, instance)


def _keep_out_of_compilation() -> None:
    """Exclude the functions of this package from compilation, once, if the compiler is loaded."""
    global _is_kept_out
    if _is_kept_out or not is_compiler_loaded():
        return
    # Looked up here, because the lookup waits if another thread is importing the compiler.
    add = lookup(f"{_COMPILER}:trace_rules.add", "keep its own functions out of torch.compile")
    _is_kept_out = True
    add(__name__.partition(".")[0])
