"""What a rank's process owes its launcher: its last words, and to end when the launcher ends.

The words are a JSON file whose path the launcher gave (TORCHELASTIC_ERROR_FILE), in the form that torch's
elastic agent reads, with two additions: the time in nanoseconds (torch keeps whole seconds, too coarse to
tell which rank failed first) and the exit code that the exception leads to (a process may be ended by a
signal of the launcher while it is still cleaning up after its own exception).

This module needs nothing but the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
import traceback
from types import TracebackType

__all__ = ["end_with_parent", "exit_code_of", "is_agreed_stop", "record_failure"]


_PR_SET_PDEATHSIG = 1


def record_failure(error: BaseException, path: str, tb: TracebackType | None = None) -> None:
    """Write an uncaught exception where the launcher looks for it; the first one stays.

    Not a failure, and not written: exit code 0, the interrupt that the launcher itself passed on, and that all ranks
    have stopped because they were asked to.

    Args:
        error: the exception that ends this process.
        path: the launcher's error file.
        tb: the traceback to show; None means the exception's own.
    """
    exit_code = exit_code_of(error)
    if not exit_code or isinstance(error, KeyboardInterrupt) or is_agreed_stop(error):
        return
    if _has_exact_time(path):
        return
    now_ns = time.time_ns()
    words = str(error.code) if isinstance(error, SystemExit) else str(error)
    shown = traceback.format_exception(type(error), error, tb or error.__traceback__)
    record = {
        "message": {
            "message": f"{type(error).__name__}: {words}",
            "extraInfo": {
                "py_callstack": "" if isinstance(error, SystemExit) else "".join(shown),
                "timestamp": str(now_ns // 10**9),
                "time_ns": now_ns,
                "exit_code": exit_code,
            },
        }
    }
    # Whole or not at all: the launcher may read while this process is being ended.
    draft = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the launcher may be gone, with its folder
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(draft, path)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a Python process that `error` ends.

    Example:
        >>> exit_code_of(ValueError()), exit_code_of(SystemExit(3)), exit_code_of(SystemExit("no data"))
        (1, 3, 1)
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def is_agreed_stop(error: BaseException) -> bool:
    """Whether all ranks end like this one, see `stopping.Stopped`. (Known by name: this module may be loaded twice.)"""
    return bool(getattr(error, "is_agreed_stop", False))


def end_with_parent(launcher_pid: int | None = None) -> None:
    """Let the kernel kill this process when the parent ends, however it ends (Linux; elsewhere nothing).

    Without it, workers whose launcher was killed with -9 go on training, unseen.

    Args:
        launcher_pid: if given, and no such process is left, the launcher died before this call: exit now.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if launcher_pid is not None and os.getppid() != launcher_pid:
        # A command between launcher and worker (a profiler, a shell) is fine as long as the launcher lives.
        try:
            os.kill(launcher_pid, 0)
        except ProcessLookupError:
            os._exit(128 + signal.SIGKILL)
        except PermissionError:
            pass


def _has_exact_time(path: str) -> bool:
    """Whether `path` holds a record of ours; one by torch's @record is replaced, for its time is coarse."""
    try:
        with open(path, encoding="utf-8") as file:
            return "time_ns" in json.load(file)["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
