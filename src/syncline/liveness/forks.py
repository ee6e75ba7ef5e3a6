"""Refusal of forked processes: a fork inherits a rank's connections and memory, but must not use them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from syncline._torch.process_groups import living_groups
from syncline.errors import SynclineError
from syncline.liveness.calls import Failure

__all__ = ["FORKED", "is_inherited", "refuse_in_forks"]


FORKED = Failure(
    SynclineError,
    "this process was forked from a rank: it is no rank itself, and what it sent over the rank's connections or wrote "
    "to shared memory would be taken for the rank's. Start processes before the ranks join, or by spawn, and "
    "synchronize in the rank only",
)


class _Refusing(Protocol):
    def refuse_a_fork(self) -> None:
        """Fail every call from now on. The fork runs no other thread meanwhile."""


_live: weakref.WeakSet[_Refusing] = weakref.WeakSet()

_inherited: set[object] = set()


def refuse_in_forks(what: _Refusing) -> None:
    """Make `what` refuse every call in processes forked from now on."""
    _live.add(what)


def is_inherited(group: object) -> bool:
    """Return whether a process group was inherited from the parent process."""
    return group in _inherited


def _in_the_fork() -> None:
    _inherited.update(living_groups())
    for what in list(_live):
        what.refuse_a_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_fork)
