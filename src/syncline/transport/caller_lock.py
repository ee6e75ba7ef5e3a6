"""A lock that lets only one thread of a rank use a transport at a time.

A thread holds the lock for a whole call, which can consist of several collectives. The lock alone is not enough: if the
threads take it in different orders on different ranks, a thread gets values that belong to another thread. So the lock
also has a name for the thread that holds it, and the ranks compare these names. The main thread has no name.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from types import TracebackType

_NUMBERS = re.compile(r"\d+")


class Turn:
    """A reentrant lock, used as a context manager, that a thread holds during a call of a transport.

    Args:
        first_is_main: whether the first thread that takes the lock counts as the main thread. If it is False, the main
            thread of the process counts as the main thread.
    """

    def __init__(self, *, first_is_main: bool = False) -> None:
        self.caller = ""
        """The name of the thread that holds the lock, the same on all ranks; "" for the main thread or no thread."""
        self._lock = threading.RLock()
        self._depth = 0
        self._first_is_main = first_is_main
        self._main: threading.Thread | None = None
        self._names: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._num_named: Counter[str] = Counter()

    def again(self) -> Turn:
        """Return a new lock that was created with the same arguments as this one."""
        return Turn(first_is_main=self._first_is_main)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self.caller = self._name_of(threading.current_thread())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.caller = ""
        self._lock.release()

    def _name_of(self, thread: threading.Thread) -> str:
        if self._main is None:
            self._main = thread if self._first_is_main else threading.main_thread()
        if thread is self._main:
            return ""
        if thread not in self._names:
            self._name_all_like(thread)
        return self._names[thread]

    def _name_all_like(self, thread: threading.Thread) -> None:
        """Give a name to `thread`, and to every unnamed thread that has the same Python name except for digits.

        Each name contains a number. The numbers follow the order in which the threads started.
        """
        stem = _NUMBERS.sub("", thread.name)
        for other in threading.enumerate():
            if other not in self._names and _NUMBERS.sub("", other.name) == stem:
                self._num_named[stem] += 1
                name = f"{stem!r}, number {self._num_named[stem]} of that name"
                # A thread called "Dummy-" was not started by Python. It runs a backward for another thread.
                self._names[other] = "" if stem == "Dummy-" else name
