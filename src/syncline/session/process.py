"""The error file that a rank writes for its launcher, and the end of a rank when its launcher ends.

The error file is a JSON file in the format that torch's elastic agent reads. The launcher sets the path of the file in
TORCHELASTIC_ERROR_FILE. Syncline adds three entries to the format:

- The time in nanoseconds. torch stores whole seconds, which is too coarse to find the rank that failed first.
- The exit code to which the exception leads. The real exit code may differ, because the launcher may end the process by
  a signal while the process cleans up after the exception.
- The whole traceback. torch's agent prints the other one, which is brief.

This module needs only the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1

_IN_STEPS, _LEFT_STEPS, _ENDED = ".in_steps", ".left_steps", ".ended"


def record_failure(error: BaseException, path: str, *, brief: str = "", whole: str = "") -> None:
    """Write an uncaught exception to the launcher's error file, unless Syncline has written to the file before.

    Write nothing if the exception is no failure: an exit with code 0, a KeyboardInterrupt (the launcher has received
    the same signal), or an agreed stop of all ranks.

    Args:
        error: the exception that ends this process.
        path: the path of the launcher's error file.
        brief: the traceback for the user.
        whole: the whole traceback.
    """
    exit_code = exit_code_of(error)
    if not exit_code or isinstance(error, KeyboardInterrupt) or is_agreed_stop(error):
        return
    if _has_exact_time(path):
        return
    now_ns = time.time_ns()
    words = str(error.code) if isinstance(error, SystemExit) else str(error)
    is_exit = isinstance(error, SystemExit)
    record = {
        "message": {
            "message": f"{type(error).__name__}: {words}",
            "extraInfo": {
                "py_callstack": "" if is_exit else brief,
                "whole_traceback": "" if is_exit else whole,
                "timestamp": str(now_ns // 10**9),
                "time_ns": now_ns,
                "monotonic_ns": time.monotonic_ns(),
                "exit_code": exit_code,
            },
        }
    }
    # Replace the file atomically, because the launcher may read it while this process is being ended.
    draft = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the launcher may have ended and removed its folder
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(draft, path)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a Python process that ends with the uncaught exception `error`.

    Examples:
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
    """Return whether `error` is a `stop_request.Stopped`, by which all ranks end in agreement.

    An attribute identifies the class, not isinstance, because this module may be loaded twice.
    """
    return bool(getattr(error, "is_agreed_stop", False))


def record_steps(path: str, name: str | None) -> None:
    """Record for the launcher whether this process is inside of `sl.steps`, where others train on if it is lost.

    Args:
        path: the path of the launcher's error file. The record is a file beside it.
        name: the name of this process in `sl.steps`; None if it has left `sl.steps`.
    """
    with contextlib.suppress(OSError):  # the launcher may have ended and removed its folder
        if name is not None:
            with open(path + _IN_STEPS, "w", encoding="utf-8") as file:
                file.write(name)
        else:
            os.replace(path + _IN_STEPS, path + _LEFT_STEPS)


def is_in_steps(path: str) -> bool:
    """Return whether the process with this error file is inside of `sl.steps`, or was when it ended."""
    return os.path.exists(path + _IN_STEPS)


def name_in_steps(path: str) -> str:
    """Return the name that the process with this error file has, or had, inside of `sl.steps`."""
    with open(path + _IN_STEPS, encoding="utf-8") as file:
        return file.read()


def came_to_steps(path: str) -> bool:
    """Return whether the process with this error file has entered `sl.steps`."""
    return os.path.exists(path + _IN_STEPS) or os.path.exists(path + _LEFT_STEPS)


def record_program_end(path: str) -> None:
    """Record for the launcher that the program of this process has ended, and that its interpreter is about to end.

    Args:
        path: the path of the launcher's error file. The record is a file beside it.
    """
    with contextlib.suppress(OSError):  # the launcher may have ended and removed its folder
        open(path + _ENDED, "w").close()


def has_program_ended(path: str) -> bool:
    """Return whether the program of the process with this error file has ended."""
    return os.path.exists(path + _ENDED)


def forget_program_end(path: str) -> None:
    """Remove what `record_program_end` has recorded."""
    with contextlib.suppress(OSError):
        os.remove(path + _ENDED)


def forget_rank(path: str) -> None:
    """Remove all records of a former process in this error file and beside it."""
    for left in (path, path + _IN_STEPS, path + _LEFT_STEPS, path + _ENDED):
        with contextlib.suppress(FileNotFoundError):
            os.remove(left)


def end_with_parent(launcher_pid: int | None = None) -> None:
    """Make the kernel kill this process when its parent process ends for any reason.

    Without this call, ranks would continue to train unnoticed after their launcher was killed with SIGKILL. On systems
    other than Linux, this function does nothing.

    Args:
        launcher_pid: the pid of the launcher. If there is no process with this pid, the launcher has already ended, and
            this process exits at once. Pass None to omit this check.
    """
    if sys.platform != "linux":
        return
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if launcher_pid is not None and os.getppid() != launcher_pid:
        # The parent may be a command between launcher and worker (a profiler, a shell). Check the launcher itself.
        try:
            os.kill(launcher_pid, 0)
        except ProcessLookupError:
            os._exit(128 + signal.SIGKILL)
        except PermissionError:
            pass


def _has_exact_time(path: str) -> bool:
    """Return whether the error file at `path` was written by Syncline, which writes the exact time.

    A file by torch's @record lacks the exact time, so Syncline replaces it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return "time_ns" in json.load(file)["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
