"""The launcher: replacements of the methods by which torch's agent starts, polls and closes the processes of a host.

torch's launcher has no public way to change these steps. So `syncline run` replaces methods of torch's
`SubprocessContext` while it runs. The ranks are other processes and are not affected.
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
        self._original = lookup(
            f"torch.distributed.elastic.multiprocessing.api:SubprocessContext.{name}", used_for
        )

    @property
    def is_there(self) -> bool:
        """Whether the installed torch has the method."""
        return is_there(self._original)

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace the method inside a `with` block.

        Args:
            make: returns the replacement, given the original function.

        Raises:
            SynclineError: torch has no such method.
        """
        if not self.is_there:
            self._original()  # raises the error
        former = getattr(SubprocessContext, self._name)
        setattr(SubprocessContext, self._name, make(former))
        try:
            yield
        finally:
            setattr(SubprocessContext, self._name, former)


START = Method("_start", "run ranks that can be asked to stop")
"""Starts all ranks of the host."""

POLL = Method("_poll", "run ranks that can be asked to stop")
"""Checks the ranks. Returns their results when all ranks have ended or one rank has failed, and None before."""

CLOSE = Method("_close", "let ranks report why a peer has ended")
"""Ends the ranks. Without this method, ranks are ended before they can report why a peer has ended."""
