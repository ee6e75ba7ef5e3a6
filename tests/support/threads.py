"""Tests of what each rank does, where ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.transport import ThreadsTransport, run_ranks

__all__ = ["on_threads"]


def on_threads(num_ranks: int) -> Callable[[Callable[[ThreadsTransport], Any]], Callable[[], None]]:
    """Make a test of a function that each rank runs."""

    def decorate(program: Callable[[ThreadsTransport], Any]) -> Callable[[], None]:
        def test() -> None:
            run_ranks(num_ranks, program)

        test.__name__, test.__doc__ = program.__name__, program.__doc__
        return test

    return decorate
