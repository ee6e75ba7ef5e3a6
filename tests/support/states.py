"""Waiting for a state, never for a time: the limit of a test is that of its process, and a hang leaves its stacks."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when `is_so` returns True."""
    while not is_so():
        time.sleep(0.001)
