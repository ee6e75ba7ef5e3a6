"""Where in the user's code a thread is: the innermost frame that is neither torch's, ours, nor Python's own.

And what of theirs was called where an exception comes from.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from syncline.transport.main_thread import dump_of_main_thread

__all__ = [
    "called_in",
    "calling",
    "innermost_in_dump",
    "is_users",
    "user_code",
    "user_code_in_dump",
    "user_code_of_main_thread",
    "warn_user",
    "warning_here",
]

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
    found |= {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    return tuple(path + os.sep for path in sorted(found))
