"""Which gradient synchronizations there are, so that a bare module's is found by its parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from syncline.sync.gradients import GradientSync

__all__ = ["caretakers_of", "remember_caretaker"]

_lock = threading.Lock()  # ranks may be threads
_known: weakref.WeakSet[GradientSync] = weakref.WeakSet()


def remember_caretaker(caretaker: GradientSync) -> None:
    """It is found while it lives and has its hooks."""
    with _lock:
        _known.add(caretaker)


def caretakers_of(parameters: Iterable[Tensor]) -> list[GradientSync]:
    """What synchronizes the gradients of any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    with _lock:
        known = list(_known)
    return [one for one in known if one.handles and any(id(p) in wanted for p in one.parameters)]
