"""The connections of this process to stores of torch.distributed, on which no request waits forever.

[Note: connections]

A TCPStore ends with the process that opened it, which is often rank 0. On a later request, torch raises an error, but
first it prints a C++ stack trace to stderr, even at the end of a program without errors. So before each request,
Syncline asks the kernel whether the server has closed the connection. If the network fails, no connection closes, and
torch would wait for an answer forever. So Syncline configures the kernel to close a connection on which the other side
no longer acknowledges anything. If the process with the server is stopped, neither happens; see the next note.

[Note: requests]

A request to a store of torch blocks until the process with the store has answered. If this process is stopped (Ctrl-Z,
a debugger), its kernel still acknowledges what it receives. So no option of the connection ends the wait. And while the
main thread is inside C++ code, Python runs no signal handler.

So another thread makes the requests of a connection, and the caller waits for it in Python: at most until a deadline,
and signal handlers run meanwhile. If the answer comes after the deadline, it is dropped, and the connection can be used
again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from syncline._torch.process_groups import PrefixStore
from syncline.environment import patience
from syncline.errors import PeerLost
from syncline.liveness.at_exit import AT_EXIT

T = TypeVar("T")

_REQUEST_TIMEOUT = timedelta(seconds=1)

ANSWER_SECONDS = patience(5.0)
"""How long a store that still runs may need for an answer on a busy host."""


class StoreSilent(PeerLost):
    """The store has not answered in time, although its connection is open. It may answer later."""


class _Call(Generic[T]):
    """A call that another thread makes."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.is_over = threading.Event()
        self._make = make
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._make())
        except BaseException as error:
            self._error = error
        self.is_over.set()

    def result(self) -> T:
        """Return what the call has returned, or raise its error."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame
        return self._results.pop()


class Requests:
    """A thread that makes the requests of one connection for all threads of this process, one after the other.

    Args:
        seconds: how long a request waits for an answer. A request that itself waits has more time.
        note_silence: a function that is called with `seconds` when a request has waited for a while. None for none.
    """

    def __init__(self, seconds: float, note_silence: Callable[[float], object] | None = None) -> None:
        self.seconds = seconds
        self._note_silence = note_silence
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._turn = threading.Lock()
        """The lock that a thread holds while it waits for an answer."""
        self._last: _Call[Any] | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=_make, args=(self._calls,), name="syncline store", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False
        AT_EXIT.stop(self)

    def stop(self, seconds: float) -> None:
        """End the thread after it has made all requests, and wait for its end, at most for `seconds`."""
        self._is_stopped = True
        self._calls.put(None)
        self._thread.join(seconds)

    def make(
        self,
        request: Callable[[], T],
        wait_seconds: float = 0.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> T:
        """Make a request on the thread, and return its result, or raise its error.

        Args:
            request: the request.
            wait_seconds: how long the request itself waits at most, for example for a key.
            meanwhile: a function that is called repeatedly while a slow request is pending. It must not use this
                connection.

        Raises:
            StoreSilent: this request was not answered in time, or an earlier one has not been answered yet.
        """
        if not _in_slices(lambda seconds: self._turn.acquire(timeout=seconds), self.seconds + wait_seconds):
            raise self._silent(self.seconds + wait_seconds)
        try:
            if self._last is not None and not self._last.is_over.is_set():
                raise self._silent(self.seconds)
            self._last = call = _Call(request)
            if self._is_stopped:  # an exit handler of the program makes a request after the thread has ended
                AT_EXIT.wait_in_torch(call.run)
                return call.result()
            self._calls.put(call)
            self._wait(call, self.seconds + wait_seconds, meanwhile, may_be_silent=not wait_seconds)
            result: T = call.result()
            return result
        finally:
            self._turn.release()

    def _wait(
        self,
        call: _Call[Any],
        seconds: float,
        meanwhile: Callable[[], object] | None,
        *,
        may_be_silent: bool,
    ) -> None:
        if may_be_silent and self._note_silence is not None and seconds > _NOTE_SECONDS:
            if _in_slices(call.is_over.wait, _NOTE_SECONDS):
                return
            self._note_silence(seconds)
            seconds -= _NOTE_SECONDS
        if not _in_slices(call.is_over.wait, seconds, meanwhile):
            raise self._silent(self.seconds)

    def _silent(self, seconds: float) -> StoreSilent:
        return StoreSilent(
            f"the store of the job has not answered for {seconds:g} s, although the connection to it is open: the "
            "process that opened it (the launcher, or rank 0) is stopped by Ctrl-Z or a debugger, or gets no time to "
            "run. Resume this process (`fg`, or `kill -CONT PID`), or end the job"
        )


def _in_slices(
    wait: Callable[[float], bool], seconds: float, meanwhile: Callable[[], object] | None = None
) -> bool:
    """Wait for something in several calls of `wait`, and return whether it has happened in time.

    Each wait is short, because the handler of a signal that arrives just before Python waits for a lock runs only when
    this wait ends.

    Args:
        wait: a function that waits for some seconds, and returns whether it has happened.
        seconds: how long to wait in all.
        meanwhile: a function to call after each part of the wait. The parts are then `MEANWHILE_SECONDS` long.
    """
    deadline = time.monotonic() + seconds
    slice_seconds = _SLICE_SECONDS if meanwhile is None else MEANWHILE_SECONDS
    while not wait(max(0.0, min(slice_seconds, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
        if meanwhile is not None:
            meanwhile()
    return True


_SLICE_SECONDS = 0.5

_NOTE_SECONDS = 2.0

MEANWHILE_SECONDS = 0.05
"""The interval at which a thread that waits at a store calls the function `meanwhile`."""


def _make(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # the results belong to the caller


def interruptibly(call: Callable[[], T], seconds: float | None = None) -> T:
    """Make a call on another thread, so that signal handlers run while the main thread waits for it.

    If the caller stops waiting, because a signal handler raises an exception, the thread continues until the call ends.

    Args:
        call: the call.
        seconds: how long to wait for it. None means that the call has a deadline of its own.

    Raises:
        StoreSilent: the call has not ended in time.
    """
    requests = Requests(threading.TIMEOUT_MAX if seconds is None else seconds)
    return requests.make(call)


# ---------------------------------------------------------------------- connections


_CONNECT_SECONDS = patience(1.0)

_CLONE_SECONDS = 20.0
"""How long a new connection may take. torch looks up the name of the other end, which takes 5 to 10 s without a DNS."""

_SILENCE_SECONDS = patience(4.0)
"""How long the other side of a connection may acknowledge nothing before the kernel closes the connection."""

_lock = threading.Lock()


class StoreLine:
    """A connection to the server of a store, which shows whether the server still exists.

    The check works only while no answer of the server is pending on the connection.

    Args:
        file_descriptor: the descriptor of the connection. When this object is deleted, it closes the descriptor.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor

    def is_open(self) -> bool:
        """Return whether the server's end of the connection is open.

        An idle connection becomes readable only when the server closes it.
        """
        if sys.platform == "win32":
            return not select.select([self._file_descriptor], [], [], 0)[0]
        poll = select.poll()  # not `select`, which refuses descriptors above 1023
        poll.register(self._file_descriptor, select.POLLIN)
        return not poll.poll(0)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            socket.close(self._file_descriptor)  # not os.close, which does not close sockets on Windows


def clone_of(
    store: Any, timeout: timedelta, silence_seconds: float = _SILENCE_SECONDS
) -> tuple[Any, StoreLine | None]:
    """Clone a store, so that the clone has its own connection and timeout.

    If the network fails, a request over the new connection raises an error instead of waiting forever. If the process
    with the store is stopped, only the deadlines of `StoreConnection` end a request.

    Args:
        store: the store.
        timeout: how long a request waits for a missing key.
        silence_seconds: how long the network may fail before a request raises an error.

    Returns:
        The clone, and a `StoreLine` to the server of the store. If the store cannot be cloned, the first result is the
        store itself. If no connection to a server is found, the second result is None.

    Raises:
        StoreSilent: the server does not answer to a new connection.
    """
    server = innermost(store)
    port = getattr(server, "port", None)
    timeout_before = store.timeout
    with _lock:  # otherwise a connection that another thread opens could be mistaken for the clone's
        before = open_sockets()
        try:
            clone = interruptibly(store.clone, _CLONE_SECONDS)
        except StoreSilent:
            raise
        except RuntimeError:
            return store, None
        made = [one for one in open_sockets() - before if port is not None and _leads_to(port, one)]
    clone.set_timeout(timeout)
    if store.timeout != timeout_before:
        clone.set_timeout(timeout_before)  # the clone and the store share one timeout
    for connection in made:
        _end_with_the_network(connection, silence_seconds)
    with contextlib.suppress(OSError):
        if len(made) == 1:
            return clone, StoreLine(os.dup(made[0]))
        if port is not None:
            # The clone's connection is unknown. The server closes another, idle connection at the same time.
            idle = socket.create_connection((server.host, port), timeout=_CONNECT_SECONDS)
            return clone, StoreLine(idle.detach())
    return clone, None


class StoreConnection:
    """A separate connection to a store, for several threads and several groups of this process.

    torch looks up the name of the other end of each new connection in the DNS. That takes seconds if the DNS does not
    answer. So the groups that follow each other in `sl.steps` use one connection, which exists before a rank is lost.

    Args:
        store: the store.
        timeout: how long a request waits for a missing key.
        silence_seconds: how long the network may fail before a request raises an error.
        answer_seconds: how long the store may take to answer before a request raises an error.
        note_silence: see `Requests`.
    """

    def __init__(
        self,
        store: Any,
        timeout: timedelta = _REQUEST_TIMEOUT,
        *,
        silence_seconds: float = _SILENCE_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
        note_silence: Callable[[float], object] | None = None,
    ) -> None:
        self.store, self._line = clone_of(store, timeout, silence_seconds)
        self._requests = Requests(answer_seconds, note_silence)

    def under(self, prefix: str) -> StoreConnection:
        """Return this connection for keys with a prefix."""
        return self._with(PrefixStore(prefix, self.store))

    def whole(self) -> StoreConnection:
        """Return this connection for keys without any prefix."""
        return self._with(innermost(self.store))

    def _with(self, store: Any) -> StoreConnection:
        other = copy.copy(self)
        other.store = store
        return other

    def ask(
        self, request: Callable[[], T], wait_seconds: float, meanwhile: Callable[[], object] | None = None
    ) -> T:
        """Make a request over this connection.

        Args:
            request: the request.
            wait_seconds: how long the store waits at most before it answers.
            meanwhile: see `Requests.make`.

        Raises:
            StoreSilent: the store has not answered in time.
            DistNetworkError: the store has ended, or cannot be reached.
        """
        return self._requests.make(partial(self._ask_if_open, request), wait_seconds, meanwhile)

    def _ask_if_open(self, request: Callable[[], T]) -> T:
        if self._line is not None and not self._line.is_open():
            raise dist.DistNetworkError("the store has closed the connection")
        return request()


def _leads_to(port: int, file_descriptor: int) -> bool:
    """Return whether the other end of the connection of this socket has the port `port`."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
        return bool(connection.getpeername()[1:2] == (port,))
    return False


def _end_with_the_network(file_descriptor: int, silence_seconds: float) -> None:
    """Configure the kernel to close a connection on which the other side no longer acknowledges anything."""
    if sys.platform != "linux":  # some of these options have other names there
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file_descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_seconds))


def open_sockets() -> set[int]:
    """Return the descriptors of all sockets of this process. The set is empty if the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found


def innermost(store: Any) -> Any:
    """Return the store without its prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
