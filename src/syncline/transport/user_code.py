"""Where in the user's code a thread is: the innermost frame that is neither torch's, ours, nor Python's own."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["user_code", "user_code_of_main_thread"]


def user_code(frame: FrameType | None) -> str | None:
    """Where in the user's code `frame` was called from.

    Example:
        >>> exec(compile("def main(): return user_code(sys._getframe())", "train.py", "exec"))
        >>> main()
        'train.py:1 in main'
    """
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            name = frame.f_code.co_name
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return place if name == "<module>" else f"{place} in {name}"
        frame = frame.f_back
    return None


def user_code_of_main_thread() -> str | None:
    """Where the main thread is, asked from any thread."""
    return user_code(sys._current_frames().get(threading.main_thread().ident or 0))


@cache
def _is_users(path: str) -> bool:
    return not path.startswith(_libraries()) and not path.startswith("<frozen ")


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that no user of ours has written."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    return tuple(path + os.sep for path in sorted(found))
