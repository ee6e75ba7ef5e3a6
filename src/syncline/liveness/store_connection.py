"""A separate connection to a store, and a check whether the store still exists.

The check asks the kernel, not the store. A TCPStore ends with the process that opened it, often rank 0. A later request
does not only raise: torch first prints a C++ stack trace to stderr, even at the end of a program without errors. So the
kernel is asked first whether the server has closed the connection.

A lost network closes no connection, and torch would wait for an answer forever. So the kernel is set to end a
connection on which the other side no longer acknowledges anything.
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
"""How long the other side's kernel may acknowledge nothing before a connection ends."""

_lock = threading.Lock()


class StoreLine:
    """A connection to a store's server, used to check that the server still exists. No answer is pending on it then.

    Args:
        file_descriptor: descriptor of the connection. This object owns it from now on.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor
        self._poll = select.poll()
        self._poll.register(file_descriptor, select.POLLIN)

    def is_open(self) -> bool:
        """Return whether the server's end is open. Only its close makes the idle connection readable."""
        return not self._poll.poll(0)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file_descriptor)


def clone_of(store: Any, timeout: timedelta) -> tuple[Any, StoreLine | None]:
    """Return a clone of a store with its own connection and timeout, and the line to the store's server.

    The connection raises when the network is lost, instead of waiting forever. A store that cannot be cloned is
    returned itself. Without a server the line is None.
    """
    innermost = _innermost(store)
    port = getattr(innermost, "port", None)
    timeout_before = store.timeout
    with _lock:  # a connection that another thread opens here would be taken for the clone's
        before = open_sockets()
        try:
            clone = store.clone()
        except RuntimeError:
            return store, None
        made = [one for one in open_sockets() - before if port is not None and _leads_to(port, one)]
    clone.set_timeout(timeout)
    if store.timeout != timeout_before:
        clone.set_timeout(timeout_before)  # the clone shares its timeout with the store
    for connection in made:
        _end_with_the_network(connection)
    with contextlib.suppress(OSError):
        if len(made) == 1:
            return clone, StoreLine(os.dup(made[0]))
        if (
            port is not None
        ):  # the clone's connection is unknown; the server closes an idle connection at the same time
            idle = socket.create_connection((innermost.host, port), timeout=_CONNECT_SECONDS)
            return clone, StoreLine(idle.detach())
    return clone, None


def _leads_to(port: int, file_descriptor: int) -> bool:
    """Return whether the other end of a socket has this port."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
        return bool(connection.getpeername()[1:2] == (port,))
    return False


def _end_with_the_network(file_descriptor: int) -> None:
    """Let the kernel end a connection on which the other side no longer acknowledges anything."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS)


def open_sockets() -> set[int]:
    """Return the descriptors of this process's sockets; empty if the system does not list them."""
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
