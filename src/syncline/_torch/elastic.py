"""The launcher: replacements for how torch's agent starts, polls and closes the processes of a host.

torch's launcher has no public way to change this. So `syncline run` replaces methods of its `SubprocessContext`, in
its own process and only while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from syncline._torch.lookup import is_there, lookup


class Method:
    """A method of torch's `SubprocessContext` that can be replaced temporarily.

    Args:
        name: the name of the method.
        used_for: the feature that needs it; see `lookup`.
    """

    def __init__(self, name: str, used_for: str) -> None:
        self._name = name
        self._is_there = is_there(
            lookup(f"torch.distributed.elastic.multiprocessing.api:SubprocessContext.{name}", used_for)
        )
        self._used_for = used_for

    @property
    def is_there(self) -> bool:
        """Whether this torch has the method."""
        return self._is_there

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace the method inside a `with` block.

        Args:
            make: returns the replacement, given the original function.

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
"""Checks whether the ranks are running; returns their results when all have ended, or one has failed."""

CLOSE = Method("_close", "let ranks report why a peer has ended")
"""Ends the ranks. If it is missing, ranks are ended without time to report why a peer has ended."""
