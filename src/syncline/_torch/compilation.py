"""torch.compile: the code that synchronizes must run as it is written. The module inside is compiled."""

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
    """Return whether anything has imported the compiler. To import it takes seconds."""
    return _COMPILER in sys.modules


def import_compiler() -> None:
    """Import it now: torch does so at the first step of an optimizer, and for checkpoints of activations."""
    importlib.import_module(_COMPILER)


class NotTraced:
    """A method that torch.compile does not trace into, while it compiles what that calls.

    As `torch.compiler.disable(recursive=False)`, without importing the compiler for those who do not compile. The
    compiler looks the method up before it decides, so the lookup is the moment to tell it.

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
    """If the compiler is loaded, tell it once not to compile the functions of this package."""
    global _is_kept_out
    if _is_kept_out or not is_compiler_loaded():
        return
    # Looked up here, for the lookup waits for another thread that imports the compiler now.
    add = lookup(f"{_COMPILER}:trace_rules.add", "keep its own functions out of torch.compile")
    _is_kept_out = True
    add(__name__.partition(".")[0])
