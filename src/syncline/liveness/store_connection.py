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
        file_descriptor: of the connection; belongs to this object from now on.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor
        self._poll = select.poll()
        self._poll.register(file_descriptor, select.POLLIN)

    def is_open(self) -> bool:
        """Whether the server still holds its end; it has nothing to say here but that it goes."""
        return not self._poll.poll(0)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file_descriptor)


def clone_of(store: Any, timeout: timedelta) -> tuple[Any, StoreLine | None]:
    """Return the same store by a connection of its own, with another timeout, and the line to the store's server.

    The connection raises when the network is gone, instead of waiting on. A store that has no clones is returned
    itself; without a server there is no line.
    """
    innermost = _innermost(store)
    port = getattr(innermost, "port", None)
    timeout_before = store.timeout
    with _lock:  # connections that another thread makes here would be taken for this one's
        before = open_sockets()
        try:
            clone = store.clone()
        except RuntimeError:
            return store, None
        made = [one for one in open_sockets() - before if port is not None and _leads_to(port, one)]
    clone.set_timeout(timeout)
    if store.timeout != timeout_before:
        clone.set_timeout(timeout_before)  # it is the same store after all
    for connection in made:
        _end_with_the_network(connection)
    with contextlib.suppress(OSError):
        if len(made) == 1:
            return clone, StoreLine(os.dup(made[0]))
        if (
            port is not None
        ):  # the clone's connection is not known; an idle one is closed by the server just so
            idle = socket.create_connection((innermost.host, port), timeout=_CONNECT_SECONDS)
            return clone, StoreLine(idle.detach())
    return clone, None


def _leads_to(port: int, file_descriptor: int) -> bool:
    """Return whether the other end of a socket has this port."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
        return bool(connection.getpeername()[1:2] == (port,))
    return False


def _end_with_the_network(file_descriptor: int) -> None:
    """Let the kernel end a connection on which the other side confirms nothing any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
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
