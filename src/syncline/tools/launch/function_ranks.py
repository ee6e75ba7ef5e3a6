"""The processes of the ranks of one `sl.launch`.

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
import signal
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from syncline import environment, launchers
from syncline._torch.process_groups import TCPStore
from syncline.errors import PeerFailed, PeerLost, SynclineError
from syncline.session.listening import LOOPBACK, bound_socket
from syncline.tools.launch.failures import Failure, describe, first_failure, read_error_file
from syncline.tools.launch.function_rank import RankTask, run_rank
from syncline.tools.launch.guardian import Guardian, running_processes
from syncline.tools.launch.output import Forwarder
from syncline.tools.launch.stopping import GRACE_SECONDS, REPORT_SECONDS
from syncline.words import describe_ranks

_STACKS_SECONDS = environment.patience(0.5)
"""The time that ranks have to print their stacks after a timeout."""


def _start(processes: Sequence[BaseProcess], over: threading.Event) -> None:
    """Start the processes of the ranks by a thread that lives until `over` is set; see the note above.

    If one cannot be started, raise the error of the thread.
    """
    errors: list[BaseException] = []
    started = threading.Event()

    def run() -> None:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork of a process with threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                for process in processes:
                    process.start()
        except BaseException as error:
            errors.append(error)
        started.set()
        over.wait()

    threading.Thread(target=run, name="syncline-launch", daemon=True).start()
    try:
        started.wait()
    except BaseException:  # Ctrl-C: a process that starts later would be left
        started.wait()
        raise
    if errors:
        raise errors[0]


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
        self._forwarder = Forwarder(_print)
        self._tails: list[Sequence[bytes]] = []
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
        tasks = [self._task(rank, store.port, call) for rank in range(self._size)]
        context: Any = get_context(self._method)
        self._processes = [
            context.Process(target=run_rank, args=(task,), name=f"syncline-rank-{task.rank}")
            for task in tasks
        ]
        over = threading.Event()
        self._forwarder.start()
        try:
            with _variables(self._size) as num_threads:
                for task in tasks:
                    task.num_threads = num_threads
                _start(self._processes, over)
            self._guardian.watch(self._mark, [process.pid or 0 for process in self._processes])
            self._wait(timeout_seconds)
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self._end(signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise
        finally:
            self._kill_left_behind()
            self._forwarder.stop()
            over.set()
        failures = self._failures(tasks)
        if failures:
            raise _error(failures)
        return Path(tasks[0].result)

    def _task(self, rank: int, port: int, call: Any) -> RankTask:
        folder = self._guardian.folder / str(rank)
        folder.mkdir()
        for name, fd in (("stdout", 1), ("stderr", 2)):
            tail = self._forwarder.add(folder / name, to_fd=fd, prefix=f"[rank {rank}] ")
            if fd == 2:
                self._tails.append(tail)
        place = launchers.Environment(
            launcher="syncline run", rank=rank, size=self._size, local_rank=rank, local_size=self._size,
            master_addr=LOOPBACK, master_port=port,
        )  # fmt: skip
        variables = place.variables() | {
            environment.RUN_MARK: self._mark,
            "TORCHELASTIC_RUN_ID": self._mark,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        }
        return RankTask(rank, os.getpid(), str(folder), variables, call, is_fork=self._method == "fork")

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
        """Return the ranks that are running, and note those that have ended."""
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

    def _kill_left_behind(self) -> None:
        """Kill processes that the ranks have started and that are still running in the sessions of the ranks."""
        sessions = {process.pid for process in self._processes} - {None}
        for process in list(running_processes()):
            if process.session in sessions:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    def _failures(self, tasks: Sequence[RankTask]) -> list[Failure]:
        """Return the failures of the ranks, in the order in which they were detected."""
        return [
            Failure(
                rank=rank,
                pid=self._processes[rank].pid or 0,
                return_code=self._processes[rank].exitcode or 0,
                record=read_error_file(tasks[rank].error_file),
                stderr_tail=[line.decode(errors="replace") for line in self._tails[rank]],
            )
            for rank in self._ended
            if self._processes[rank].exitcode
        ]


@contextlib.contextmanager
def _variables(size: int) -> Iterator[int | None]:
    """Set variables for spawned ranks. Yield the number of threads of a rank; None if the user has set it."""
    num_threads = environment.threads_per_rank(size)
    before = environment.export({"OMP_NUM_THREADS": str(num_threads)})
    try:
        yield num_threads if "OMP_NUM_THREADS" in before else None
    finally:
        environment.restore(before)


def _print(fd: int, data: bytes) -> None:
    """Print lines of ranks. In a notebook, `sys.stdout` is the output of the cell."""
    stream = sys.stdout if fd == 1 else sys.stderr
    with contextlib.suppress(OSError, ValueError):  # nothing reads it any more
        stream.write(data.decode(errors="replace"))
        stream.flush()


def _error(failures: Sequence[Failure]) -> SynclineError:
    """Return the error about failed ranks. Its text names the rank that failed first."""
    text = f"sl.launch: {describe(failures, host=socket.gethostname())}"
    return PeerLost(text) if first_failure(failures).is_killed else PeerFailed(text)
