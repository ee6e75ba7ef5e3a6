"""Where in the user's code a thread is: the innermost frame that is neither torch's, ours, nor Python's own.

And what of theirs was called where an exception comes from.

What the main thread is doing, asked from another one.

Its frames must not be walked in Python: it goes on between one look and the next, and what it has left may be freed
(seen as a crash in Python 3.11, under torch's dynamo). So it is written down by one call of the interpreter's, during
which no thread runs Python.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "called_in",
    "calling",
    "dump_of_main_thread",
    "innermost_in_dump",
    "is_users",
    "user_code",
    "user_code_in_dump",
    "user_code_of_main_thread",
    "warn_user",
    "warning_here",
]


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

_CALLED = "_syncline_called_in"

_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<thread>[0-9a-f]+) ")

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\S+) in (?P<name>.*)')


def warn_user(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """A warning at the line of the user's code that called us."""
    warning_here(category)(text)


def warning_here(category: type[Warning] = RuntimeWarning) -> Callable[[str], None]:
    """What warns, later and from any thread, at the line of the user's code that calls us now."""
    frame = _users_frame(sys._getframe())
    if frame is None:
        return lambda text: warnings.warn(text, category, stacklevel=3)
    path, line = frame.f_code.co_filename, frame.f_lineno
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    return lambda text: warnings.warn_explicit(text, category, path, line, module=module, registry=registry)


def user_code(frame: FrameType | None) -> str | None:
    """Where in the user's code `frame` was called from.

    Example:
        >>> import sys
        >>> exec(compile("def main(): return user_code(sys._getframe())", "train.py", "exec"))
        >>> main()
        'train.py:1 in main'
    """
    frame = _users_frame(frame)
    if frame is None:
        return None
    return _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Code that is not ours is called: an exception that it raises says so, and `called_in` knows.

    Args:
        what: whose code.

    Example:
        >>> try:
        ...     with calling("state_dict() of sampler (Mine)"):
        ...         raise KeyError("place")
        ... except KeyError as error:
        ...     print(error.__notes__)
        ['in state_dict() of sampler (Mine)']
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, _CALLED):  # the innermost says most
            setattr(error, _CALLED, _called(what, error))
            error.add_note(f"in {what}")
        raise


def called_in(error: BaseException) -> str | None:
    """What was called that raised it, and the line of it where that can be told; None where the error is our own."""
    found: str | None = getattr(error, _CALLED, None)
    return found


def _called(what: str, error: BaseException) -> str:
    place, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            place = _place(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return f"{what}, at {place}," if place else what


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_code_of_main_thread() -> str | None:
    """Where the main thread is, asked from any thread."""
    return user_code_in_dump(dump_of_main_thread(), threading.main_thread().ident or 0)


def user_code_in_dump(text: str, thread: int) -> str | None:
    """As `user_code`, of one thread in what `faulthandler` has written of all.

    Example:
        >>> dump = 'Thread 0x2a (most recent call first):\\n  File "/home/train.py", line 7 in main'
        >>> user_code_in_dump(dump, 42)
        'train.py:7 in main'
    """
    for frame in _frames_in_dump(text, thread):
        if is_users(frame["path"]):
            return _place(frame["path"], frame["line"], frame["name"])
    return None


def innermost_in_dump(text: str, thread: int) -> tuple[str, str]:
    """File and function of a thread's innermost frame in such a dump; two empty strings if it has none.

    Example:
        >>> innermost_in_dump('Thread 0x2a (most recent call first):\\n  File "/home/train.py", line 7 in main', 42)
        ('/home/train.py', 'main')
    """
    frame = next(_frames_in_dump(text, thread), None)
    return ("", "") if frame is None else (frame["path"], frame["name"])


def _frames_in_dump(text: str, thread: int) -> Iterator[re.Match[str]]:
    is_asked_for = False
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            is_asked_for = int(head["thread"], 16) == thread
        elif is_asked_for and (frame := _FRAME.match(line)) is not None:
            yield frame


def _place(path: str, line: int | str, name: str) -> str:
    place = f"{os.path.basename(path)}:{line}"
    return place if name == "<module>" else f"{place} in {name}"


@cache
def is_users(path: str) -> bool:
    """Whether a file of code is neither torch's, nor ours, nor Python's own, nor of an installed package."""
    return not path.startswith(_libraries()) and not path.startswith("<frozen ")


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that no user of ours has written."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
    return tuple(path + os.sep for path in sorted(found))
