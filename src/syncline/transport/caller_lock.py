"""A lock that lets one thread of a rank use a transport at a time, and the thread's name for comparison between ranks.

A thread holds the lock for a whole call, which may consist of several collectives. The lock alone is not enough: the
threads may take it in different orders on different ranks, and each would get the other's values. So the ranks compare
the calling thread as well, unless it is the main thread.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from types import TracebackType

_NUMBERS = re.compile(r"\d+")


class Turn:
    """A reentrant lock for calls of a transport, used as a context manager.

    Args:
        first_is_main: whether the first thread to enter counts as the rank's main thread, instead of the main thread
            of the process.
    """

    def __init__(self, *, first_is_main: bool = False) -> None:
        self.caller = ""
        """A name of the thread that holds the lock, the same on all ranks; empty for the main thread, and if no thread
        holds the lock."""
        self._lock = threading.RLock()
        self._depth = 0
        self._first_is_main = first_is_main
        self._main: threading.Thread | None = None
        self._names: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._num_named: Counter[str] = Counter()

    def again(self) -> Turn:
        """Return a new lock with the same setting."""
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
        """Number the threads with the same name in the order of their start; no number is used twice."""
        stem = _NUMBERS.sub("", thread.name)
        for other in threading.enumerate():
            if other not in self._names and _NUMBERS.sub("", other.name) == stem:
                self._num_named[stem] += 1
                name = f"{stem!r}, number {self._num_named[stem]} of that name"
                # A "Dummy-" thread was not started by Python: it runs a backward for another thread.
                self._names[other] = "" if stem == "Dummy-" else name
