"""Kept out of torch.compile: what synchronizes must run as it is written. The module inside is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

__all__ = ["NotTraced"]

_is_kept_out = False


class NotTraced:
    """A method that torch.compile does not trace into, while it compiles what that calls.

    As `torch.compiler.disable(recursive=False)`, without importing the compiler for those who do not compile: that
    takes seconds. The compiler looks the method up before it decides, so the lookup is the moment to tell it.

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
    """If the compiler is loaded: tell it, once, not to compile the functions of this package."""
    global _is_kept_out
    if _is_kept_out or "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo import trace_rules

    _is_kept_out = True
    trace_rules.add(__name__.partition(".")[0])
