"""Is the store still there? Asked of the kernel, not of the store.

A TCPStore ends with the process that opened it, often rank 0. Whoever talks to it afterwards is not only told so by
an exception: torch prints a C++ stack trace to stderr first, at the end of a program in which nothing went wrong. So
an idle connection of our own tells, by having been closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["StoreLine", "line_to"]

_CONNECT_SECONDS = 1.0


class StoreLine:
    """An idle connection to a store's server.

    Args:
        address: of the server.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._file_descriptor = socket.create_connection(address, timeout=_CONNECT_SECONDS).detach()
        self._poll = select.poll()
        self._poll.register(self._file_descriptor, select.POLLIN)

    def is_open(self) -> bool:
        """Whether the server still holds its end; it has nothing to say here but that it goes."""
        return not self._poll.poll(0)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file_descriptor)


_lines: WeakValueDictionary[tuple[int, str, int], StoreLine] = WeakValueDictionary()


def line_to(store: Any) -> StoreLine | None:
    """The line to `store`'s server, one for each server; None for a store without one, or that cannot be reached."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        return None
    key = os.getpid(), store.host, store.port
    line = _lines.get(key)
    if line is None:
        try:
            line = StoreLine((store.host, store.port))
        except OSError:
            return None
        _lines[key] = line
    return line
