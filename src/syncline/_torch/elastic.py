"""Replacements of the methods by which torch's elastic agent starts, polls and closes the processes of a host.

torch's launcher has no public way to change these steps. So `syncline run` replaces methods of torch's
`SubprocessContext` while it runs. This does not affect the ranks, which are other processes.
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
        used_for: the feature that needs the method; see `lookup`.
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
            make: a function that takes the original method and returns its replacement.

        Raises:
            SynclineError: the installed torch lacks the method.
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
"""The method that starts all ranks of the host."""

POLL = Method("_poll", "run ranks that can be asked to stop")
"""The method that checks the ranks: it returns the results once all ranks have ended or one has failed, else None."""

CLOSE = Method("_close", "let ranks report why a peer has ended")
"""The method that ends the ranks. The replacement first lets them report why a peer has ended."""
