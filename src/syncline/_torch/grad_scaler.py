"""Detection of GradScalers in use. A scaler expects infinite gradients at times, because it then lowers its scale.

torch keeps no list of scalers. So methods of torch's class are replaced, once per process, when the first finder is
created.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import GradScaler

from syncline._torch.lookup import attribute

__all__ = ["ScalerFinder"]


_lock = threading.Lock()  # ranks may be threads

_seen: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""Scalers that have scaled a loss since the first finder was created."""

_SCALING = ("scale", "_lazy_init_scale_growth_tracker")
"""Every loss goes through the first method. A subclass with its own `scale` calls the second at its first loss. If
torch has no such method, that scaler is found only by a search among all objects."""

_scale_of = attribute("_scale", "see whether a GradScaler is in use")
"""Return the scale of a GradScaler; None until it has scaled a loss."""


class ScalerFinder:
    """A search for a `torch.amp.GradScaler` that is in use: alive, enabled, and with at least one scaled loss.

    Scalers are not registered. After the first finder is created, `GradScaler.scale` records each scaler that scales a
    loss, by a weak reference. Recorded scalers are found even after `gc.freeze()`, which hides all present objects from
    searches. Scalers that scaled a loss earlier are searched among all objects. This takes milliseconds, in the rare
    steps with a gradient that is not finite.

    Example:
        >>> import torch
        >>> finder = ScalerFinder()
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> _ = scaler.scale(torch.ones(()))
        >>> finder.is_any_in_use()
        True
    """

    def __init__(self) -> None:
        _note_those_that_scale()

    def is_any_in_use(self) -> bool:
        """Return whether a scaler is in use."""
        with _lock:
            seen = list(_seen)
        if any(_is_in_use(scaler) for scaler in seen):
            return True
        for scaler in _living():
            if _is_in_use(scaler):
                _remember(scaler)
                return True
        return False


def _is_in_use(scaler: GradScaler) -> bool:
    return scaler.is_enabled() and _scale_of(scaler) is not None


def _living() -> Iterator[GradScaler]:
    kinds = [GradScaler]
    for kind in kinds:  # the list grows by the subclasses of its entries
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. `type` instead of isinstance, which may run code of unrelated objects.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _remember(scaler: GradScaler) -> None:
    with _lock:
        _seen.add(scaler)


def _note_those_that_scale() -> None:
    """Record scalers that scale a loss from now on; `torch.cuda.amp.GradScaler` and other subclasses inherit this."""
    with _lock:
        for name in _SCALING:
            method = getattr(GradScaler, name, None)
            if method is not None and not hasattr(method, "_is_noting"):
                setattr(GradScaler, name, _noting(method))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # compiled code stays unchanged
            _remember(self)
        return method(self, *args, **kwargs)

    noting._is_noting = True  # type: ignore[attr-defined]
    return noting
