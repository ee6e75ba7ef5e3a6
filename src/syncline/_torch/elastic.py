"""The launcher: how it starts, polls and closes the processes of a host.

torch's launcher takes no orders for what it does with its processes. So methods of its `SubprocessContext` are
replaced, while `syncline run` is at work, in that process only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline._torch.lookup import is_there, lookup

__all__ = ["CLOSE", "POLL", "START", "Method"]


class Method:
    """A method of torch's `SubprocessContext` that can be replaced for a while.

    Args:
        name: of the method.
        used_for: what does not work without it; see `lookup`.
    """

    def __init__(self, name: str, used_for: str) -> None:
        self._name = name
        self._is_there = is_there(
            lookup(f"torch.distributed.elastic.multiprocessing.api:SubprocessContext.{name}", used_for)
        )
        self._used_for = used_for

    @property
    def is_there(self) -> bool:
        """Whether torch has it."""
        return self._is_there

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """While this is open, have another function in its place.

        Args:
            make: makes the function, given the one that was there.

        Raises:
            SynclineError: torch has no such method.
        """
        former = lookup(
            f"torch.distributed.elastic.multiprocessing.api:SubprocessContext.{self._name}", self._used_for
        )
        if not is_there(former):
            former()
        setattr(SubprocessContext, self._name, make(former))
        try:
            yield
        finally:
            setattr(SubprocessContext, self._name, former)


START = Method("_start", "run ranks that can be asked to stop")
"""Starts all ranks of the host."""

POLL = Method("_poll", "run ranks that can be asked to stop")
"""Looks whether the ranks still run; returns their results when all have ended, or one has failed."""

CLOSE = Method("_close", "let ranks report why a peer has ended")
"""Ends the ranks. Where it is missing, ranks are ended without a moment to report why a peer has ended."""
