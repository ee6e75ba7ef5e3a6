"""Which thread of a rank may use a transport now, and how the ranks find out that it is not the same on all.

A call that consists of several collectives is one thread's from beginning to end. That alone does not keep threads
apart: on one rank this thread may be first, on another that one, and each would get the other's values. So who calls
is compared as well, where it is not the main thread.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from types import TracebackType

__all__ = ["Turn"]


_NUMBERS = re.compile(r"\d+")


class Turn:
    """Held by the thread that is at it; a context manager that a thread may enter again.

    Args:
        first_is_main: the first thread to come is a rank's main thread, whatever it is to its process.
    """

    def __init__(self, *, first_is_main: bool = False) -> None:
        self.caller = ""
        """The thread that is at it, in words that are the same on all ranks; empty for the main thread, and where
        nobody is."""
        self._lock = threading.RLock()
        self._depth = 0
        self._first_is_main = first_is_main
        self._main: threading.Thread | None = None
        self._names: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._num_named: Counter[str] = Counter()

    def again(self) -> Turn:
        """A new one of the same kind."""
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
        """Number the threads of a name in the order in which they were started; no number is given twice."""
        stem = _NUMBERS.sub("", thread.name)
        for other in threading.enumerate():
            if other not in self._names and _NUMBERS.sub("", other.name) == stem:
                self._num_named[stem] += 1
                name = f"{stem!r}, number {self._num_named[stem]} of that name"
                # "Dummy-" is none of Python's own: it runs a backward for another.
                self._names[other] = "" if stem == "Dummy-" else name
