"""The end of a process: while Python shuts down, no thread is inside C++ code of torch that may need Python again.

Up to Python 3.13, a thread that asks for the interpreter's lock while Python shuts down is ended there. Inside C++ code
of torch, this aborts the process (exit status 134), or leaves a mutex locked for ever. So before Python shuts down:

- Threads of Syncline leave C++ code and end, or stay outside of it. The end of the
  process waits for a thread that runs destructors or callbacks.
- Threads of the program that wait for a collective of Syncline stay outside of C++ code (`AtExit.wait_in_torch`).
- A thread of a Gloo group drops the tensors of a collective a little after the collective has ended. It needs Python
  for it only if Python code is the only other owner of the tensor. So C++ code becomes another owner of all tensors.
- A process group that still exists is never destroyed. Its destructor would wait for operations that other ranks may
  never join, and Python runs it late, when the threads of the group can no longer end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from syncline._torch.process_groups import living_groups, uses_gloo
from syncline._torch.tensors import owner_of_all_tensors

T = TypeVar("T")

_AT_EXIT_SECONDS = 10.0

_STOP_SECONDS = 1.0

_YIELD_SECONDS = 0.0005
"""How long `end` sleeps at a time, so that threads which wait for the interpreter's lock can run."""

_NUM_YIELDS = 10


class Stoppable(Protocol):
    """An object with a thread that may be inside of C++ code for long."""

    def stop(self, seconds: float) -> object:
        """Stop the thread, and wait for its end, at most for `seconds`."""


class AtExit:
    """The threads, locks and groups that the end of this process waits for, stops or keeps."""

    def __init__(self) -> None:
        self._groups: WeakSet[Any] = WeakSet()
        """Process groups, also those that torch has forgotten."""
        self.begin_in_fork()
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.begin_in_fork)

    def begin_in_fork(self) -> None:
        """Forget the threads of the parent process. A fork does not have them."""
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._locks: WeakSet[threading.Lock] = WeakSet()
        self._stoppable: WeakSet[Stoppable] = WeakSet()
        self._waiting: set[int] = set()
        """The threads that wait inside of C++ code."""
        self._ending: int | None = None
        """The thread that ends the process."""
        self.is_over = False
        """Whether `end` has returned. Then only exit handlers of the program still run, in the thread that ends it."""

    def wait_for(self, thread: threading.Thread) -> None:
        """Make the end of the process wait for a thread. All of its waits together take at most 10 s."""
        self._threads.add(thread)

    def acquire(self, lock: threading.Lock) -> None:
        """Make the end of the process acquire a lock and keep it. All of its waits together take at most 10 s.

        Args:
            lock: a lock that a thread holds while it is inside C++ code.
        """
        self._locks.add(lock)

    def stop(self, what: Stoppable) -> None:
        """Stop a thread when the process ends, and wait for it for at most 1 s."""
        self._stoppable.add(what)

    def keep(self, group: object) -> None:
        """If a Gloo group still exists at the end of the process, never destroy it. Torch may have forgotten it."""
        self._groups.add(group)

    def wait_in_torch(self, wait: Callable[..., T], *args: object) -> T:
        """Call a function that waits in C++ code for a short time, with its arguments, and return its result.

        Once the process ends, only the thread that ends it may call the function. Other threads wait here for ever.
        """
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            if self._ending not in (None, thread):
                self._waiting.discard(thread)
                threading.Event().wait()  # Python ends the thread here, outside of C++ code
            return wait(*args)
        finally:
            self._waiting.discard(thread)

    def end(self) -> None:
        """Wait for, stop and keep the registered objects. Python calls this function before it shuts down."""
        deadline = time.monotonic() + _AT_EXIT_SECONDS
        self._ending = threading.get_ident()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(_YIELD_SECONDS)
        for what in _all(self._stoppable):
            what.stop(max(0.0, min(_STOP_SECONDS, deadline - time.monotonic())))
        for thread in _all(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        for lock in _all(self._locks):
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        kept = [group for group in {*_all(self._groups), *living_groups()} if uses_gloo(group)]
        if kept:
            keep_for_ever(kept)
            keep_for_ever(owner_of_all_tensors())
            for _ in range(_NUM_YIELDS):
                time.sleep(_YIELD_SECONDS)
        self.is_over = True


AT_EXIT = AtExit()


def keep_for_ever(what: object) -> None:
    """Let an object, and what it refers to, exist until the kernel ends the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _all(of: WeakSet[T]) -> list[T]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return list(of)


class Keeper:
    """A thread that keeps process groups, or operations, alive, and then drops them.

    Args:
        kept: a list of them, which is cleared then. No other object may hold a reference to this list.
        seconds: the longest time for which they are kept.

    Raises:
        RuntimeError: Python is ending, and starts no threads.
    """

    def __init__(self, kept: list[Any], seconds: float) -> None:
        self._is_over = threading.Event()
        arguments = kept, seconds, self._is_over
        self._thread = threading.Thread(
            target=_keep, args=arguments, name="syncline keeps memory", daemon=True
        )
        self._thread.start()

    def drop(self) -> None:
        """Let the thread drop them now. This method does not wait for the thread."""
        AT_EXIT.wait_for(self._thread)
        self._is_over.set()


def _keep(kept: list[Any], seconds: float, is_over: threading.Event) -> None:
    is_over.wait(seconds)
    AT_EXIT.wait_for(threading.current_thread())
    kept.clear()
