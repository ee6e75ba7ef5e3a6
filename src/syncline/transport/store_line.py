"""Is the store still there? Asked of the kernel, not of the store.

A TCPStore ends with the process that opened it, often rank 0. Whoever talks to it afterwards is not only told so by
an exception: torch prints a C++ stack trace to stderr first, at the end of a program in which nothing went wrong. So
an idle connection of our own tells, by having been closed.

A network that is gone closes nothing: torch waits for an answer without end. So the kernel is asked to end a connection
on which nothing is confirmed any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["StoreLine", "ends_with_the_network", "line_to", "open_sockets"]

_CONNECT_SECONDS = 1.0
_SILENCE_SECONDS = 4
"""How long the other side's kernel may confirm nothing before a connection ends."""


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


@contextlib.contextmanager
def ends_with_the_network(store: Any) -> Iterator[None]:
    """Connections to `store`'s server that are made within raise when the network is gone, instead of waiting on."""
    port = getattr(_innermost(store), "port", None)
    before = open_sockets()
    yield
    for file_descriptor in open_sockets() - before if port is not None else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS)


def open_sockets() -> set[int]:
    """This process's sockets, where the system tells."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


_lines: WeakValueDictionary[tuple[int, str, int], StoreLine] = WeakValueDictionary()


def line_to(store: Any) -> StoreLine | None:
    """The line to `store`'s server, one for each server; None for a store without one, or that cannot be reached."""
    store = _innermost(store)
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
