"""What the main thread is doing, asked from another one.

Its frames must not be walked in Python: it goes on between one look and the next, and what it has left may be freed
(seen as a crash in Python 3.11, under torch's dynamo). So it is written down by one call of the interpreter's, during
which no thread runs Python.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import tempfile
import threading

__all__ = ["dump_of_main_thread"]

_HEADER = "Thread 0x{thread:016x} (most recent call first):\n"


def dump_of_main_thread() -> str:
    """Its stack as `faulthandler` writes it, those of other threads perhaps as well; may be empty.

    Example:
        >>> "dump_of_main_thread" in dump_of_main_thread()
        True
    """
    with tempfile.TemporaryFile() as file:
        if sys.version_info >= (3, 12):
            faulthandler.dump_traceback(file, all_threads=True)
            written = ""
        else:
            written = _dump_alone(file.fileno())
        file.seek(0)
        return written + file.read().decode("ascii", "replace")


# Python 3.11 lists a new thread before it is complete. Where a thread of C++ comes to Python for the first time while
# all are written down, the process dies: seen with Gloo's, which free tensors; a thread made by ctypes over and over
# shows it within seconds. There, the main thread is written down alone.

_main_state: int | None = None
"""The interpreter's record of the main thread: an address, good until the process ends."""


def _dump_alone(fd: int) -> str:
    """Write the main thread's stack; what has to go before it."""
    dump = getattr(ctypes.pythonapi, "_Py_DumpTraceback", None)
    if dump is None or _main_state is None:
        return ""
    dump.restype = None
    dump(ctypes.c_int(fd), ctypes.c_void_p(_main_state))
    return _HEADER.format(thread=threading.main_thread().ident or 0)


def _note_main_thread() -> None:
    """Where this is imported by another thread, and until it forks, nothing can be said about the main one."""
    global _main_state
    if sys.version_info < (3, 12) and threading.current_thread() is threading.main_thread():
        current = ctypes.pythonapi.PyThreadState_Get
        current.restype = ctypes.c_void_p
        _main_state = current()


_note_main_thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)  # it was perhaps another thread that forked
