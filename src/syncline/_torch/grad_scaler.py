"""GradScalers in use: one expects infinite gradients now and then, and has to see them to lower its scale.

torch keeps no list of them. So methods of torch's class are replaced, once in a process, when the first finder is made.
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
"""Those that have scaled a loss since the first finder was made."""

_SCALING = ("scale", "_lazy_init_scale_growth_tracker")
"""Every loss goes through the first. A subclass with a `scale` of its own calls the second at its first loss. Where
torch has no such method, that scaler is found only among all objects."""

_scale_of = attribute("_scale", "see whether a GradScaler is in use")
"""Return the scale of a GradScaler: None until it has scaled a loss."""


class ScalerFinder:
    """Finds a `torch.amp.GradScaler` of this process that is in use: alive, enabled, and one that has scaled a loss.

    Nobody registers a scaler. From the first finder on each one is remembered, but not kept alive, when it scales a
    loss: `GradScaler.scale` notes it. That finds it also after `gc.freeze()`, which hides all that there is from
    searches. Those that have scaled before are looked for among all objects, which takes milliseconds, in the rare step
    in which a gradient is not finite.

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
        """Whether there is one."""
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
    for kind in kinds:  # it grows by the subclasses of what is in it
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. By `type`, for isinstance may run code of objects that are none of our business.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _remember(scaler: GradScaler) -> None:
    with _lock:
        _seen.add(scaler)


def _note_those_that_scale() -> None:
    """From now on, once in a process. `torch.cuda.amp.GradScaler` and other subclasses inherit it."""
    with _lock:
        for name in _SCALING:
            method = getattr(GradScaler, name, None)
            if method is not None and not hasattr(method, "_is_noting"):
                setattr(GradScaler, name, _noting(method))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a compiled one is left as it is
            _remember(self)
        return method(self, *args, **kwargs)

    noting._is_noting = True  # type: ignore[attr-defined]
    return noting
