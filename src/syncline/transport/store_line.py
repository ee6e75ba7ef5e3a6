"""A connection of our own to a store, and whether the store is still there: asked of the kernel, not of the store.

A TCPStore ends with the process that opened it, often rank 0. Whoever talks to it afterwards is not only told so by
an exception: torch prints a C++ stack trace to stderr first, at the end of a program in which nothing went wrong. So
the kernel is asked before, whether the server has closed the connection.

A network that is gone closes nothing: torch waits for an answer without end. So the kernel is asked to end a connection
on which nothing is confirmed any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from datetime import timedelta
from typing import Any

__all__ = ["StoreLine", "clone_of", "open_sockets"]

_CONNECT_SECONDS = 1.0
_SILENCE_SECONDS = 4
"""How long the other side's kernel may confirm nothing before a connection ends."""
_lock = threading.Lock()


class StoreLine:
    """A connection to a store's server, on which no answer is awaited while it is asked about.

    Args:
        connection: a socket, which is taken over.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._file_descriptor = connection.detach()
        self._poll = select.poll()
        self._poll.register(self._file_descriptor, select.POLLIN)

    def is_open(self) -> bool:
        """Whether the server still holds its end; it has nothing to say here but that it goes."""
        return not self._poll.poll(0)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file_descriptor)


def clone_of(store: Any, timeout: timedelta) -> tuple[Any, StoreLine | None]:
    """The same store by a connection of its own, with a timeout of its own; `store` itself where it has no clones.

    Also the line to its server, None where there is no server. Its connection raises when the network is gone, instead
    of waiting on.
    """
    innermost = _innermost(store)
    port = getattr(innermost, "port", None)
    timeout_before = store.timeout
    with _lock:  # another one's connections would be taken for this one's
        before = open_sockets()
        try:
            clone = store.clone()
        except RuntimeError:
            return store, None
        made = [] if port is None else _connections_to(port, open_sockets() - before)
    clone.set_timeout(timeout)
    if store.timeout != timeout_before:
        clone.set_timeout(timeout_before)  # it is the same store after all
    for connection in made:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS)
    if len(made) == 1:
        return clone, StoreLine(made[0])
    for connection in made:
        connection.close()
    # Which connection is the clone's nobody knows here: an idle one tells as well that the server has gone.
    with contextlib.suppress(OSError):
        if port is not None:
            return clone, StoreLine(
                socket.create_connection((innermost.host, port), timeout=_CONNECT_SECONDS)
            )
    return clone, None


def _connections_to(port: int, file_descriptors: set[int]) -> list[socket.socket]:
    """Those of these sockets whose other end has this port."""
    found = []
    for file_descriptor in file_descriptors:
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(file_descriptor))
            try:
                is_one = connection.getpeername()[1:2] == (port,)
            except OSError:
                is_one = False
            if is_one:
                found.append(connection)
            else:
                connection.close()
    return found


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
