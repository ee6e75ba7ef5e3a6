"""Functions that find positions in the user's code, for errors and warnings.

The position of a thread in the user's code is the line of its innermost frame outside of torch, Syncline, Python and
installed packages. This module also records which function of the user raised an exception.

Another thread can ask for the position of the main thread. It must not walk the frames of the main thread in Python,
because the main thread continues to run, and a frame that has ended can be freed at any time. (This crashed Python 3.11
under torch's dynamo.) So a single call of the interpreter writes the whole stack. No thread runs Python during this
call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from syncline.words import printable

_HEADER = "Thread 0x{thread:016x} (most recent call first):\n"


def dump_of_main_thread() -> str:
    """Return the stack of the main thread, as text in the format of `faulthandler`.

    The text can also contain the stacks of other threads. It is empty if the stack cannot be read.

    Examples:
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


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the identifier of the thread.

    Python 3.11 can deadlock if its garbage collector starts inside of `sys._current_frames`: destructors let other
    threads run, while the function holds a lock that a thread needs to end. So the collector runs just before it.
    """
    if sys.version_info < (3, 12) and gc.isenabled():
        gc.collect(0)
    return sys._current_frames()


# Python 3.11 lists a new thread before it is complete. If a C++ thread enters Python for the first time while all
# stacks are written, the process crashes. This happened with Gloo's threads, which free tensors. A program that creates
# threads through ctypes in a loop reproduces it within seconds. On Python 3.11, only the main thread's stack is
# therefore written.

_main_state: int | None = None
"""The address of the interpreter's state for the main thread; None if unknown. It is valid until the process ends."""


def _dump_alone(fd: int) -> str:
    """Write the stack of the main thread to the file descriptor `fd`, and return the header line for this stack.

    If the stack cannot be read, write nothing and return "".
    """
    dump = getattr(ctypes.pythonapi, "_Py_DumpTraceback", None)
    if dump is None or _main_state is None:
        return ""
    dump.restype = None
    dump(ctypes.c_int(fd), ctypes.c_void_p(_main_state))
    return _HEADER.format(thread=threading.main_thread().ident or 0)


def _note_main_thread() -> None:
    """On Python 3.11, store the address of the interpreter's state for the main thread.

    If a thread other than the main thread imports this module, the address stays unknown. Then `dump_of_main_thread`
    returns an empty text in this process.
    """
    global _main_state
    if sys.version_info < (3, 12) and threading.current_thread() is threading.main_thread():
        current = ctypes.pythonapi.PyThreadState_Get
        current.restype = ctypes.c_void_p
        _main_state = current()


_note_main_thread()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)  # the forking thread becomes the main thread

_CALLED = "_syncline_called_in"

_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<thread>[0-9a-f]+) ")

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\S+) in (?P<name>.*)')


def warn_user(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that shows the line of the user's code that called Syncline."""
    warning_here(category)(text)


def warning_here(category: type[Warning] = RuntimeWarning) -> Callable[[str], None]:
    """Return a function that issues a warning for the line of the user's code that runs now.

    Any thread can call the returned function later. Its argument is the text of the warning.
    """
    frame = _users_frame(sys._getframe())
    if frame is None:
        return lambda text: warnings.warn(printable(text), category, stacklevel=3)
    path, line = frame.f_code.co_filename, frame.f_lineno
    module = frame.f_globals.get("__name__", "<string>")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return lambda text: warnings.warn_explicit(
        printable(text), category, path, line, module=module, registry=registry
    )


def user_code(frame: FrameType | None) -> str | None:
    """Return the position in the user's code that led to `frame`; None if no frame belongs to the user's code.

    Examples:
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
    """Mark an exception that is raised inside this context as an exception of a function of the user.

    The exception gets a note that names the function. `called_in` returns the function and its line for this exception.

    Args:
        what: a text that names the user's function, which is called inside this context.

    Examples:
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
        if not hasattr(error, _CALLED):  # keep the innermost mark, which is the most precise
            setattr(error, _CALLED, _called(what, error))
            error.add_note(f"in {what}")
        raise


def called_in(error: BaseException | None) -> str | None:
    """Return the name of the user's function that raised `error`, with the line if it is known.

    Returns None if the error was not raised inside of `calling`.
    """
    found: str | None = getattr(error, _CALLED, None)
    return found


def _called(what: str, error: BaseException) -> str:
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if is_users(code.co_filename):
            place = _place(code.co_filename, line, code.co_name)
    return f"{what}, at {place}," if place else what


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_code_in_dump(text: str, thread: int) -> str | None:
    """Read a dump, and return the position of one thread in the user's code; None if the dump has none.

    Args:
        text: the dump, in the format of `faulthandler`.
        thread: the identifier of the thread.

    Examples:
        >>> dump = 'Thread 0x2a (most recent call first):\\n  File "/home/train.py", line 7 in main'
        >>> user_code_in_dump(dump, 42)
        'train.py:7 in main'
    """
    for frame in _frames_in_dump(text, thread):
        if is_users(frame["path"]):
            return _place(frame["path"], frame["line"], frame["name"])
    return None


def innermost_in_dump(text: str, thread: int) -> tuple[str, str]:
    """Read a dump, and return the file and the function of the innermost frame of one thread.

    Returns two empty strings if the dump has no frame of the thread. See `user_code_in_dump` for the arguments.

    Examples:
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
    """Return whether a source file belongs to the user, and not to torch, Syncline, Python or an installed package."""
    return not path.startswith(_libraries()) and not path.startswith("<frozen ")


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages, of torch and of Syncline, each with a final separator."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
    return tuple(path + os.sep for path in sorted(found))
