"""What happens, while Python shuts down, to threads of Syncline that may be inside C++ code of torch.

The destructor of a Gloo group waits for its threads and pending operations, so it runs where nobody waits for it. Gloo
completes a message only while a thread waits for it. And a thread completes the futures of the backend, which run
callbacks of the program. But up to Python 3.13, a thread that is inside C++ code when Python has shut down aborts the
process, whose exit status is then 134. So the end of the process waits for destructors and callbacks. The other threads
may be inside such code for as long as a peer takes: if the native library is there, they sleep instead of aborting the
process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import weakref
from typing import TypeVar

from syncline.native import NativeUnavailable, library

T = TypeVar("T")

_AT_EXIT_SECONDS = 10.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def wait_at_exit(thread: threading.Thread) -> None:
    """Let the end of the process wait for a thread, for all threads and locks together at most 10 s."""
    _threads.add(thread)


def acquire_at_exit(lock: threading.Lock) -> None:
    """Let the end of the process acquire a lock and keep it, for all threads and locks together within at most 10 s.

    Args:
        lock: a lock that a thread holds while it is inside C++ code.
    """
    _locks.add(lock)


@atexit.register
def _wait() -> None:
    _let_threads_sleep()
    deadline = time.monotonic() + _AT_EXIT_SECONDS
    for thread in _all(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    for lock in _all(_locks):
        lock.acquire(timeout=max(0.0, deadline - time.monotonic()))


def _all(of: weakref.WeakSet[T]) -> list[T]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return list(of)


def _let_threads_sleep() -> None:
    """Let threads that Python would end inside C++ code sleep instead. (Python 3.14 and later do this.)"""
    if sys.version_info >= (3, 14):
        return
    with contextlib.suppress(NativeUnavailable, OSError, AttributeError):
        cpp = ctypes.CDLL("libstdc++.so.6")  # torch has loaded it
        functions = cpp["_ZSt13set_terminatePFvvE"], cpp["__cxa_current_exception_type"]
        library().let_threads_sleep(*functions)


class Keeper:
    """A thread that keeps process groups alive, and then drops them.

    Args:
        groups: the groups. Nobody else may hold a reference to this list.
        seconds: how long they are kept at most.

    Raises:
        RuntimeError: Python is ending, and starts no threads.
    """

    def __init__(self, groups: list[object], seconds: float) -> None:
        self._is_over = threading.Event()
        arguments = groups, seconds, self._is_over
        self._thread = threading.Thread(
            target=_keep, args=arguments, name="syncline keeps groups", daemon=True
        )
        self._thread.start()

    def drop(self) -> None:
        """Drop the groups now. This method does not wait for it."""
        wait_at_exit(self._thread)
        self._is_over.set()


def _keep(groups: list[object], seconds: float, is_over: threading.Event) -> None:
    is_over.wait(seconds)
    wait_at_exit(threading.current_thread())
    groups.clear()
