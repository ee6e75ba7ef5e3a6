"""Methods that do not keep their object alive.

A bound method in an object's own `__dict__` is a reference cycle. The object, and memory that it has mapped, would stay
until the garbage collector runs.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["unbound", "weakly", "weakly_bound"]


def unbound(owner: object, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of `owner` as a function of the owner. A bound method's function holds no reference to it."""
    if getattr(method, "__self__", None) is owner:
        own: Callable[..., Any] = method.__func__  # type: ignore[attr-defined]
        return own

    @functools.wraps(method)
    def function(owner_: object, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def weakly_bound(owner: object, function: Callable[..., Any]) -> Any:
    """Return the equivalent of `MethodType(function, owner)`, with `__func__` and signature but without `__self__`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.double_of = weakly_bound(layer, lambda self, x: 2 * x)
        >>> layer.double_of(21)
        42
    """
    reference = weakref.ref(owner)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None, "whose method is called exists"
        return function(found, *args, **kwargs)

    bound: Any = method
    del (
        bound.__wrapped__
    )  # otherwise `inspect.signature` would follow it, and include the owner among the parameters
    signature = inspect.signature(function)
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    bound.__func__ = function
    return bound


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive; it does nothing after that."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*args)

    return call
