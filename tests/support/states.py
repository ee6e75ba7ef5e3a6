"""Waiting for a state, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hangs import HANG_SECONDS

__all__ = ["wait_until"]


_T = TypeVar("_T")


def wait_until(is_so: Callable[[], _T], tell: Callable[[], object] = str) -> _T:
    """Return what `is_so` returns as soon as that is true.

    Raises:
        TimeoutError: it is not so for minutes. The text is what `tell` returns.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{HANG_SECONDS:g} s: {tell()}")
        time.sleep(0.001)
    return found
