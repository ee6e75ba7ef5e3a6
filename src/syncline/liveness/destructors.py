"""Threads in which destructors of torch's process groups run.

The destructor of a Gloo group waits for its threads and pending operations, so it runs where nobody waits for it. But
a thread that is still in such a destructor when Python has shut down aborts the process. So the end of the process
waits for these threads.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

_AT_EXIT_SECONDS = 10.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_at_exit(thread: threading.Thread) -> None:
    """Let the end of the process wait for a thread, for all such threads together at most 10 s."""
    _threads.add(thread)


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + _AT_EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


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
