"""The process of a rank of `sl.launch`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any

import torch

from syncline import environment, tracebacks
from syncline.session.process import end_with_parent, exit_code_of, record_failure
from syncline.session.world import begin_in_fork, leave_at_end


@dataclass
class RankTask:
    """The task of one rank."""

    rank: int
    launcher_pid: int
    folder: str
    """The private folder of the rank. It has the pipes for the rank's output."""
    variables: dict[str, str]
    call: Any
    """The function with its arguments: a tuple, or a pickle if the rank was spawned."""
    is_fork: bool
    num_threads: int | None
    """The number of threads with which torch computes. None means the number that the user has set."""

    @property
    def result(self) -> str:
        """The path of the file for the result, which rank 0 writes."""
        return os.path.join(self.folder, "result")

    @property
    def error_file(self) -> str:
        return self.variables["TORCHELASTIC_ERROR_FILE"]


def run_rank(task: RankTask) -> None:
    """Run the function of a task in this process, which `multiprocessing` has started."""
    os.setsid()  # Ctrl-C reaches the launcher only, which then ends the ranks
    end_with_parent(task.launcher_pid)
    _use_pipes(task.folder)
    _reset_signals()
    gc.freeze()  # the objects of the parent belong to the parent
    # The launcher shows the exception. Hooks that are installed from here on still report it to the peers.
    sys.excepthook = lambda *_: None
    environment.export(task.variables, replace=True)
    if task.is_fork:
        begin_in_fork()
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    code = 0
    try:
        fn, args, kwargs = task.call if task.is_fork else pickle.loads(task.call)
        result = fn(*args, **kwargs)
        if task.rank == 0:
            _write(result, task.result)
    except BaseException as error:
        code = exit_code_of(error)
        _report(error, task.error_file)
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
    """Undo what the parent does at signals. SIGQUIT prints the stacks of all threads."""
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
            f"expected the function to return on rank 0 what can be pickled, got a {type(result).__name__} "
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
