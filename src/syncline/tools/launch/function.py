"""`sl.launch`, which runs a function on several ranks, from a notebook or a plain script.

[Note: fork or spawn]

A forked rank begins with everything that the parent process has: imported modules, functions that were defined in a
notebook, and data, without a copy. But a fork has only the thread that forked. Three things therefore do not work in a
fork: CUDA, if the parent has initialised it; a process group of the parent; and the threads of OpenMP.

torch computes on the CPU with OpenMP. If the main thread has computed with several threads before, a fork of this
thread hangs at its first large operation, because it waits for threads that it does not have (measured with torch 2.13:
a backward through a matmul of 600 x 600). GNU's OpenMP keeps a pool of threads for each thread that computes. So the
ranks are forked by a new thread, which has never computed. It becomes the main thread of the rank, and OpenMP creates a
new pool for it.

The kernel ends a rank when the thread that has started it ends (see `process.end_with_parent`). The new thread
therefore waits until all ranks have ended.

Spawned ranks are new interpreters. They import torch and the module of the function, and the function is sent as a
pickle. Only this process and its own children read the pickles.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from syncline import environment, launchers
from syncline._torch.process_groups import TCPStore
from syncline.checks import (
    checked_choice,
    checked_count,
    checked_function,
    checked_kind,
    checked_seconds,
    suggests_arguments,
)
from syncline.errors import PeerFailed, PeerLost, SynclineError
from syncline.session.listening import LOOPBACK, bound_socket
from syncline.tools.launch.display import Display
from syncline.tools.launch.failures import Failure, describe, first_failure, read_error_file
from syncline.tools.launch.function_rank import RESULT, run_rank
from syncline.tools.launch.guardian import Guardian, kill_sessions
from syncline.tools.launch.output import Forwarder
from syncline.tools.launch.stopping import GRACE_SECONDS, REPORT_SECONDS
from syncline.words import describe_ranks

T = TypeVar("T")

_ERROR_FILE = "error.json"

_STACKS_SECONDS = environment.patience(0.5)
"""The time that ranks have to print their stacks after a timeout."""


@suggests_arguments
def launch(
    fn: Callable[..., T],
    ranks: int = 2,
    *,
    args: list[Any] | tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    method: Literal["fork", "spawn"] | None = None,
    timeout: timedelta | float | None = None,
) -> T:
    """Run a function on several ranks of this host, and return the result of rank 0.

    Use it in a notebook or in a plain script, without a launcher. Each rank is a process, in which `fn` is a whole
    program: it calls `sl.init()` first. The printed lines of all ranks appear here, with the rank before each line. If
    a rank fails, the other ranks are ended. Ctrl-C (in a notebook, the stop button) ends all ranks. If this process is
    killed, its ranks end, too.

    Each rank computes with (cores / ranks) threads, unless OMP_NUM_THREADS is set.

    Args:
        fn: the function.
        ranks: the number of ranks.
        args: the positional arguments of `fn`.
        kwargs: the arguments of `fn` by name.
        method: how the ranks are started. "fork" copies this process: everything that is defined here exists in the
            ranks. "spawn" starts new interpreters: they import `fn` from its module, or receive it by cloudpickle if
            that package is installed; a script must call `launch` under `if __name__ == "__main__"`. None means "fork"
            where it is safe: on Linux, if this process uses neither a GPU nor a process group.
        timeout: how long the ranks may run, as a timedelta or in seconds. None means no limit.

    Returns:
        The result of `fn` on rank 0. It is pickled: return numbers, text, tensors on the CPU, state dicts.

    Raises:
        PeerFailed: a rank raised an exception. The text names the rank that failed first, and shows its traceback.
        PeerLost: a rank was killed. The text names it.
        TimeoutError: the ranks have not ended in time. They have printed their stacks.
        TypeError, ValueError: an argument is invalid, or cannot be sent to a spawned rank.
        SynclineError: this process is a rank of a job, "fork" was requested and is not safe, or the system is Windows.

    Examples:
        >>> import syncline as sl
        >>> def program(value):
        ...     world = sl.init()
        ...     return sl.gather(value + world.rank).tolist()
        >>> sl.launch(program, ranks=2, args=(10,))
        [10, 11]
    """
    checked_function("fn", fn)
    size = checked_count("ranks", ranks, at_least=1)
    checked_kind("args", args, (list, tuple), "a list or tuple of the arguments of fn")
    if kwargs is not None:
        checked_kind("kwargs", kwargs, Mapping, "a dict of the arguments of fn by name")
    seconds = None if timeout is None else checked_seconds("timeout", timeout)
    if method is not None:
        checked_choice("method", method, ("fork", "spawn"))
    if sys.platform == "win32":
        raise SynclineError(
            "sl.launch needs Linux or macOS, but this system is Windows: start the ranks with torchrun"
        )
    if environment.is_explained():
        return fn(*args, **(kwargs or {}))  # this process is a rank already
    _refuse_in_a_rank()
    chosen = _method(method)
    call = (fn, tuple(args), dict(kwargs or {}))
    with Guardian(environment.for_child({})) as guardian:
        path = FunctionRanks(size, chosen, guardian).run(
            _pickled(*call) if chosen == "spawn" else call, seconds
        )
        # Rank 0 writes no result if it ends by sys.exit(0).
        result: Any = pickle.loads(path.read_bytes()) if path.exists() else None
    returned: T = result
    return returned


# ---------------------------------------------------------------------- before the start


def _refuse_in_a_rank() -> None:
    """Raise an error if this process is itself a rank of a job.

    Raises:
        SynclineError: this process is a rank.
    """
    env = launchers.current()
    is_member = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if env.launcher != "alone" or is_member:
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_member else (env.rank, env.size)
        raise SynclineError(
            f"sl.launch starts the ranks of a job, but this process is already rank {rank} of {size} of a job "
            f"(launcher: {env.launcher}). Call the function itself, without sl.launch, or start this program with "
            "`python` instead of a launcher"
        )


def _method(asked: str | None) -> str:
    """Return how the ranks are started.

    Raises:
        SynclineError: "fork" was requested and is not safe.
    """
    reason = None
    if sys.platform != "linux":
        reason = "torch's libraries do not work in a fork on this system"
    elif torch.cuda.is_initialized():
        reason = "this process has initialised CUDA, which does not work in a fork"
    elif dist.is_available() and dist.is_initialized():
        reason = "this process has initialised torch.distributed, which does not work in a fork"
    if asked == "fork" and reason is not None:
        raise SynclineError(
            f'sl.launch(method="fork") is not safe: {reason}. Use method="spawn", or move this use into the function '
            "and start this process (in a notebook: the kernel) again"
        )
    return asked or ("spawn" if reason is not None else "fork")


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a function and its arguments as a pickle for spawned ranks.

    Raises:
        TypeError: they cannot be pickled.
    """
    remedy = "install cloudpickle, or define the function in a module and import it"
    if find_spec("cloudpickle") is not None:
        import cloudpickle

        dumps, remedy = cloudpickle.dumps, "pass only what can be pickled"
    else:
        dumps = pickle.dumps
        main = sys.modules["__main__"]
        if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
            raise TypeError(
                f"expected fn to be a function of a module, got {fn!r}, which is defined in a notebook or a prompt, "
                f"so a spawned rank cannot import it: {remedy}"
            )
    try:
        content: bytes = dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"expected a function and arguments that a spawned rank can receive, got {type(error).__name__}: {error}. "
            f"For sl.launch with method='spawn', {remedy}"
        ) from error
    return content


# ---------------------------------------------------------------------- from the start to the end


class _Cell(Display):
    """A display that writes to `sys.stdout`, which is the output of the cell in a notebook."""

    def show(self, fd: int, data: bytes) -> None:
        stream = sys.stdout if fd == 1 else sys.stderr
        with contextlib.suppress(OSError, ValueError):  # the reader of the output has ended
            stream.write(data.decode(errors="replace"))
            stream.flush()


class FunctionRanks:
    """The processes of one call of `launch`.

    Args:
        size: the number of ranks.
        method: "fork" or "spawn".
        guardian: the guardian of this process. The private files of the ranks are in its folder.
    """

    def __init__(self, size: int, method: str, guardian: Guardian) -> None:
        self._size = size
        self._method = method
        self._guardian = guardian
        self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._forwarder = Forwarder(_Cell())
        self._tails: list[Sequence[bytes]] = []
        """The last lines that each rank has printed to stderr."""
        self._processes: list[BaseProcess] = []
        self._ended: list[int] = []
        """The ranks that have ended, in the order in which they were detected."""

    def run(self, call: Any, timeout_seconds: float | None) -> Path:
        """Run the ranks until all have ended. Return the path of the file with the result of rank 0.

        Args:
            call: the function with its arguments, as a tuple or as a pickle.
            timeout_seconds: how long the ranks may run. None means no limit.
        """
        # Ranks connect to this store only from this host, and it ends with this call.
        bound = bound_socket(LOOPBACK, 0)
        store = TCPStore(
            LOOPBACK, bound.getsockname()[1], self._size, True, multi_tenant=True, wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )  # fmt: skip
        is_set = "OMP_NUM_THREADS" in environment.variables()
        num_threads = None if is_set else environment.threads_per_rank(self._size)
        context: Any = get_context(self._method)
        for rank in range(self._size):
            arguments = str(self._folder(rank)), self._prepared(rank, store.port), call, num_threads
            process = context.Process(target=run_rank, args=arguments, name=f"syncline-rank-{rank}")
            self._processes.append(process)
        over = threading.Event()
        self._forwarder.start()
        try:
            self._start(over)
            self._guardian.watch(self._mark, [process.pid or 0 for process in self._processes])
            self._wait(timeout_seconds)
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self._end(signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise
        finally:
            kill_sessions({process.pid for process in self._processes if process.pid}, set(), self._mark)
            self._forwarder.stop()
            over.set()
        if failures := self._failures():
            text = f"sl.launch: {describe(failures, host=socket.gethostname())}"
            raise PeerLost(text) if first_failure(failures).is_killed else PeerFailed(text)
        return self._folder(0) / RESULT

    def _folder(self, rank: int) -> Path:
        return self._guardian.folder / str(rank)

    def _prepared(self, rank: int, port: int) -> dict[str, str]:
        """Create the folder and the pipes of a rank. Return its environment variables."""
        folder = self._folder(rank)
        folder.mkdir()
        for name, fd in (("stdout", 1), ("stderr", 2)):
            tail = self._forwarder.add(folder / name, to_fd=fd, prefix=f"[rank {rank}] ")
        self._tails.append(tail)  # of stderr
        place = launchers.Environment(
            launcher="syncline run", rank=rank, size=self._size, local_rank=rank, local_size=self._size,
            master_addr=LOOPBACK, master_port=port,
        )  # fmt: skip
        return place.variables() | {
            environment.RUN_MARK: self._mark,
            "TORCHELASTIC_RUN_ID": self._mark,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(folder / _ERROR_FILE),
        }

    def _start(self, over: threading.Event) -> None:
        """Start the processes of the ranks by a thread that lives until `over` is set; see the note above.

        If one cannot be started, raise the error of the thread.
        """
        threads = str(environment.threads_per_rank(self._size))
        before = environment.export({"OMP_NUM_THREADS": threads})  # for spawned ranks
        errors: list[BaseException] = []
        started = threading.Event()

        def run() -> None:
            try:
                with warnings.catch_warnings():
                    # Python 3.12 warns of every fork of a process with threads.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    for process in self._processes:
                        process.start()
            except BaseException as error:
                errors.append(error)
            started.set()
            over.wait()

        threading.Thread(target=run, name="syncline-launch", daemon=True).start()
        try:
            started.wait()
        except BaseException:  # Ctrl-C, for example: a process that starts later would not be ended
            started.wait()
            raise
        finally:
            environment.restore(before)
        if errors:
            raise errors[0]

    # ------------------------------------------------------------------ until the end

    def _wait(self, timeout_seconds: float | None) -> None:
        """Wait until all ranks have ended. If one has failed, end the others.

        Raises:
            TimeoutError: the ranks have not ended in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while running := self._running():
            if any(self._processes[rank].exitcode for rank in self._ended):
                self._wait_some(REPORT_SECONDS)
                self._end(signal.SIGTERM)
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                for rank in running:
                    self._signal(rank, signal.SIGQUIT)  # prints the stacks; see `run_rank`
                self._wait_some(_STACKS_SECONDS)
                raise TimeoutError(
                    f"sl.launch: expected all ranks to end within {timeout_seconds:g} s, but "
                    f"{describe_ranks(running)} of {self._size} did not. The stacks of their threads are printed above"
                )
            connection.wait([self._processes[rank].sentinel for rank in running], left)

    def _running(self) -> list[int]:
        """Return the ranks that are running, and record those that have ended."""
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and (process.pid is None or process.exitcode is not None):
                self._ended.append(rank)
        return [rank for rank in range(len(self._processes)) if rank not in self._ended]

    def _wait_some(self, seconds: float) -> None:
        """Wait until all ranks have ended, but not longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while (running := self._running()) and (left := deadline - time.monotonic()) > 0:
            connection.wait([self._processes[rank].sentinel for rank in running], left)

    def _end(self, number: signal.Signals) -> None:
        """End the ranks by a signal. Kill those that have not ended a few seconds later."""
        for rank in self._running():
            self._signal(rank, number)
        try:
            self._wait_some(GRACE_SECONDS)
        finally:  # also at a second Ctrl-C
            for rank in self._running():
                self._signal(rank, signal.SIGKILL)
        self._wait_some(GRACE_SECONDS)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        process = self._processes[rank]
        # The number of a process that has not been waited for is not given to another process.
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _failures(self) -> list[Failure]:
        """Return the failures of the ranks, in the order in which they were detected."""
        return [
            Failure(
                rank=rank,
                pid=self._processes[rank].pid or 0,
                return_code=self._processes[rank].exitcode or 0,
                record=read_error_file(str(self._folder(rank) / _ERROR_FILE)),
                stderr_tail=[line.decode(errors="replace") for line in self._tails[rank]],
            )
            for rank in self._ended
            if self._processes[rank].exitcode
        ]
