"""Tests that are one program of all ranks, which are threads."""

from __future__ import annotations

import functools
from collections.abc import Callable

from support.cases import case
from syncline.transport import ThreadsTransport, run_ranks

__all__ = ["on_threads"]


def on_threads(*sizes: int) -> Callable[[Callable[[ThreadsTransport], object]], Callable[[], None]]:
    """Run a test on so many ranks: with several numbers, on the one after the other. It gets the transport."""

    def decorate(test: Callable[[ThreadsTransport], object]) -> Callable[[], None]:
        @functools.wraps(test)
        def run() -> None:
            for size in sizes:
                with case(f"{size} ranks"):
                    run_ranks(size, test)

        del run.__wrapped__  # type: ignore[attr-defined]  # else pytest takes the transport for a fixture
        return run

    return decorate
