"""Is a GradScaler at work? It means infinite gradients to happen, and has to see them to lower its scale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from torch.amp import GradScaler

__all__ = ["ScalerFinder"]


class ScalerFinder:
    """Finds a `torch.amp.GradScaler` of this process that is in use: alive, enabled, and one that has scaled a loss.

    Nobody registers a scaler, so it is looked for among all objects. That takes milliseconds, and is for the rare step
    in which a gradient is not finite; one that was found is remembered, but not kept alive.

    Example:
        >>> import torch
        >>> finder = ScalerFinder()
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> _ = scaler.scale(torch.ones(()))
        >>> finder.is_any_in_use()
        True
    """

    def __init__(self) -> None:
        self._known: weakref.ref[GradScaler] | None = None

    def is_any_in_use(self) -> bool:
        """Whether there is one."""
        known = None if self._known is None else self._known()
        if known is not None and _is_in_use(known):
            return True
        for scaler in _living():
            if _is_in_use(scaler):
                self._known = weakref.ref(scaler)
                return True
        return False


def _is_in_use(scaler: GradScaler) -> bool:
    return scaler.is_enabled() and scaler._scale is not None  # made when the first loss is scaled


def _living() -> Iterator[GradScaler]:
    kinds = [GradScaler]
    for kind in kinds:  # it grows by the subclasses of what is in it
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    # An object refers to its class. By `type`, for isinstance may run code of objects that are none of our business.
    return (found for found in gc.get_referrers(*kinds) if type(found) in kinds)
