"""The process of a rank of `sl.launch`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch

from syncline import environment, tracebacks
from syncline.session.process import end_with_parent, exit_code_of, record_failure
from syncline.session.world import begin_in_fork, leave_at_end

RESULT = "result"
"""The name of the file in which rank 0 writes the result as a pickle."""


def run_rank(folder: str, variables: Mapping[str, str], call: Any, num_threads: int | None) -> None:
    """Run a function in this process, which `multiprocessing` has started.

    Args:
        folder: the private folder of the rank. It has the pipes for the rank's output, and gets the result.
        variables: the environment variables of the rank.
        call: the function with its arguments: a tuple, or a pickle if the rank was spawned.
        num_threads: the number of threads with which torch computes. None means the number that the user has set.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    os.setsid()  # Ctrl-C reaches the launcher only, which then ends the ranks
    end_with_parent(launcher.pid)
    _use_pipes(folder)
    _reset_signals()
    gc.freeze()  # the objects of the parent belong to the parent
    # The launcher shows the exception. Hooks that are installed from here on still report it to the peers.
    sys.excepthook = lambda *_: None
    environment.export(variables, replace=True)
    is_spawned = isinstance(call, bytes)
    if not is_spawned:
        begin_in_fork()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    code = 0
    try:
        fn, args, kwargs = pickle.loads(call) if is_spawned else call
        result = fn(*args, **kwargs)
        if variables["RANK"] == "0":
            _write(result, os.path.join(folder, RESULT))
    except BaseException as error:
        code = exit_code_of(error)
        _report(error, variables["TORCHELASTIC_ERROR_FILE"])
    leave_at_end()
    if code:
        sys.exit(code)


def _use_pipes(folder: str) -> None:
    """Print to the pipes of this rank, and read nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        pipe = os.open(os.path.join(folder, name), os.O_WRONLY)
        os.dup2(pipe, fd)
        os.close(pipe)
    # In a notebook, the objects of the parent write to its frontend.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _reset_signals() -> None:
    """Remove the signal handlers of the parent, and let SIGQUIT print the stacks of all threads."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGQUIT, sys.stderr, all_threads=True)


def _write(result: Any, path: str) -> None:
    """Write the result of rank 0 as a pickle.

    Raises:
        TypeError: the result cannot be pickled.
    """
    try:
        content = pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"expected the function to return a value that can be pickled on rank 0, got a {type(result).__name__} "
            f"({type(error).__name__}: {error}): return numbers, text, tensors on the CPU or state dicts"
        ) from error
    with open(path, "wb") as file:
        file.write(content)


def _report(error: BaseException, error_file: str) -> None:
    """Record an exception for the launcher, and report it to the peers, as the end of an interpreter does."""
    described = tracebacks.describe(error)
    record_failure(error, error_file, brief=described.brief, whole=described.whole)
    if isinstance(error, SystemExit):
        return
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
