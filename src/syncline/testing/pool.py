"""A pool of rank processes that have already imported torch. For each test, they form a new process group.

On Linux, rank processes are forked from templates. A template is a process that has already imported everything that a
rank needs, so a fork takes only milliseconds. There are two templates, one for even ranks and one for odd ranks. Two
processes that were started separately have different string hashes, and so iterate over a set in different orders. Code
that depends on the order of a set therefore behaves differently on even and odd ranks, in tests as in real jobs.

The code of this file runs in the process of pytest. The rank processes run `worker.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any

from syncline.launchers import Environment

WORKER = "syncline.testing.worker"

FORKS = "--fork"

_POLL_SECONDS = 0.002

_WRITING_SECONDS = 10.0
"""How long a process may take to write its stacks."""


def _start(channel: socket.socket, output: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `worker.py` and prints to the file `output`, with its stacks at SIGABRT."""
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", WORKER, str(channel.fileno()), *options],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach pytest only, which then ends the workers
        )


class Template:
    """A handle of a process that forks workers. Several threads can use one template at the same time.

    Args:
        output: the file for the stdout and stderr of the process.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs, output, FORKS)
        self._channel = Connection(ours.detach())
        self._lock = Lock()

    def fork(self, channel: socket.socket, output: Path) -> ForkedProcess:
        """Fork a new worker. It receives its tasks through `channel`, and prints to the file `output`."""
        pid = self.ask(str(output), channel)
        assert pid is not None
        return ForkedProcess(self, pid)

    def close(self) -> None:
        """Kill the template process. The workers that it has forked then end as well."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def ask(self, request: str | int, handle: socket.socket | None = None) -> int | None:
        """Send a request to the template process, and return the reply.

        Args:
            request: a path or a process number. A path requests a new worker that prints to this file. The reply is the
                process number of the new worker. The process number of a worker requests the exit code of this worker.
                The reply is the exit code, or None if the worker has not ended.
            handle: the channel of the new worker. Pass None if `request` is a process number.
        """
        try:
            with self._lock:
                self._channel.send(request)
                if handle is not None:
                    send_handle(self._channel, handle.fileno(), self._process.pid)
                if not self._channel.poll(_START_SECONDS):
                    _abort(self._process)
                answer: int | None = self._channel.recv()
        except (EOFError, OSError) as error:
            printed = self._output.read_text(errors="replace")
            raise RuntimeError(
                "the process from which ranks are forked has ended unexpectedly, or did not answer within "
                f"{_START_SECONDS:g} s. Its output:\n{printed}"
            ) from error
        return answer


class ForkedProcess:
    """A handle of a forked worker. It has those methods of `subprocess.Popen` that the pool needs."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self._exit_code: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code of the process, or None if the process has not ended."""
        if self._exit_code is None:
            self._exit_code = self._template.ask(self.pid)
        return self._exit_code

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal `number` to the process, unless the process has ended."""
        if self.poll() is None:
            # The process number cannot be reused yet, because the template has not waited for it.
            os.kill(self.pid, number)


_NUM_KINDS = 2
"""The workers of even ranks, and those of odd ranks."""

_START_SECONDS = 300.0
"""How long the pool waits for a worker to start. The value allows for a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A call of a test function that all ranks run."""

    module: str
    """The name of the module that defines the function."""
    qualname: str
    """The qualified name of the function within its module. For a method, it begins with the name of the class."""
    arguments: dict[str, Any]
    """The function's arguments, by name. They must be picklable."""
    timeout_seconds: float
    """The time limit of the task. The outcome of a rank that has not ended by then is "stuck"."""
    warning_filters: tuple[str, ...] = ()
    """Warning filters, in the format of pytest's `filterwarnings` option."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a task on one rank."""

    kind: str
    """One of "passed", "skipped", "xfailed", "failed", "stuck" and "killed".

    The value "killed" means that SIGKILL ended the process of the rank, as the test requires.
    """
    text: str = ""
    """The reason for the result. It is empty for "passed" and "killed"."""


@dataclass
class _Worker:
    number: int
    """The number of this worker, in the order in which workers were started, from 1."""
    process: subprocess.Popen[bytes] | ForkedProcess
    channel: Connection
    output: Path
    output_from: int = 0
    output_before: str = ""
    """The output that the worker printed before this task. If the worker dies, this output may explain the death."""
    is_ready: bool = False

    def new_output(self) -> str:
        """Return the output that the worker has printed since the last call of this method."""
        with self.output.open("rb") as file:
            file.seek(self.output_from)
            data = file.read()
        self.output_from += len(data)
        return data.decode(errors="replace").strip()

    def send(self, message: object) -> None:
        # Use plain pickle, because torch would send tensors as descriptors of shared memory, and the worker would need
        # this process's key to open them. If the worker has died, this is detected when its outcome is awaited.
        with contextlib.suppress(OSError):
            self.channel.send_bytes(pickle.dumps(message))

    def wait_ready(self) -> None:
        if not self.is_ready:
            try:
                if not self.channel.poll(_START_SECONDS):
                    _abort(self.process)
                self.channel.recv_bytes()
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"a rank process ended before it was ready, or was not ready within {_START_SECONDS:g} s. "
                    f"Its output:\n{self.new_output()}"
                ) from error
            self.is_ready = True

    def kill(self) -> None:
        """Kill the process and the children in its session, such as workers of a DataLoader."""
        self.channel.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it was forked just now, and has no session yet
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class RankPool:
    """A pool of worker processes that run one function on several ranks at once.

    A worker is started when it is first needed, and is then reused. Several threads can run tasks at the same time.
    Each task has its own workers.

    Args:
        grace_seconds: how long the other ranks may still run after one rank has failed.
    """

    def __init__(self, grace_seconds: float = 5.0) -> None:
        self._grace_seconds = grace_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-ranks-")
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._idle: tuple[list[_Worker], ...] = tuple([] for _ in range(_NUM_KINDS))
        self._templates: list[Template] = []
        # Elsewhere each worker is started anew: on macOS, libraries that torch needs do not work in a forked child.
        if sys.platform == "linux":
            folder = Path(self._folder.name)
            self._templates = [Template(folder / f"template-{kind}.log") for kind in range(_NUM_KINDS)]

    def run(self, size: int, task: Task, killed: Collection[int] = ()) -> list[Outcome]:
        """Run a task on `size` ranks, which form a process group. Return one outcome per rank, in rank order.

        Args:
            size: the number of ranks.
            task: the task.
            killed: the ranks whose processes the test itself kills with SIGKILL. If such a process is not killed, its
                outcome is "failed".

        The outcome of a rank is "stuck" if the rank has not ended at the task's time limit, or `grace_seconds` after
        another rank failed. This outcome includes the stacks of the rank's threads. If any rank has failed or is stuck,
        all processes of the task are killed, because their state is unknown.
        """
        store_path = os.path.join(tempfile.mkdtemp(prefix="store-", dir=self._folder.name), "store")
        workers = [self._take(rank % _NUM_KINDS) for rank in range(size)]
        outcomes: list[Outcome] = []
        try:
            for worker in workers:
                worker.wait_ready()
                worker.output_before = worker.new_output()
            with held_port() as port:
                for rank, worker in enumerate(workers):
                    worker.send((task, store_path, variables_of_rank(rank, size, port)))
                outcomes = self._collect(workers, task.timeout_seconds, killed)
        finally:
            is_sound = outcomes and not {"failed", "stuck"} & {outcome.kind for outcome in outcomes}
            for rank, worker in enumerate(workers):
                if is_sound and worker.process.poll() is None:
                    worker.send("all ranks have ended")
                    self._give_back(worker, rank % _NUM_KINDS)
                else:
                    worker.kill()
        return outcomes

    def close(self) -> None:
        """End all workers and templates. Call this method only when no task is running."""
        for workers in self._idle:
            for worker in workers:
                worker.kill()
            workers.clear()
        for template in self._templates:
            template.close()
        self._folder.cleanup()

    def _give_back(self, worker: _Worker, kind: int) -> None:
        """Return a worker to the pool after a task, and keep the idle workers sorted by age.

        The pool takes the oldest idle worker first, so a rank has the same process from test to test. Counters that
        processes keep are then equal on all ranks. For example, torch's RPC counts how often it was started.
        """
        with self._lock:
            self._idle[kind].append(worker)
            self._idle[kind].sort(key=lambda worker: worker.number)

    def _take(self, kind: int) -> _Worker:
        """Take the oldest idle worker of one kind from the pool. If no such worker is idle, start a new worker.

        Args:
            kind: 0 for the workers of even ranks, 1 for the workers of odd ranks.
        """
        with self._lock:
            if self._idle[kind]:
                return self._idle[kind].pop(0)
        number = next(self._numbers)
        output = Path(self._folder.name) / f"worker-{number}.log"
        output.touch()
        ours, theirs = socket.socketpair()
        with theirs:
            templates = self._templates
            process = templates[kind].fork(theirs, output) if templates else _start(theirs, output)
        worker = _Worker(number, process, Connection(ours.detach()), output)
        worker.send(list(sys.path))
        return worker

    def _collect(
        self, workers: list[_Worker], timeout_seconds: float, killed: Collection[int]
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_seconds
        channels = {worker.channel: rank for rank, worker in enumerate(workers)}
        while channels:
            ready = wait(list(channels), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                assert isinstance(channel, Connection)
                rank = channels.pop(channel)
                outcomes[rank] = _outcome(workers[rank], must_be_killed=rank in killed)
                if outcomes[rank].kind == "failed":
                    deadline = min(deadline, time.monotonic() + self._grace_seconds)
        for rank in channels.values():
            outcomes[rank] = Outcome(kind="stuck", text=_stacks(workers[rank]))
        return [outcomes[rank] for rank in range(len(workers))]


def _outcome(worker: _Worker, *, must_be_killed: bool) -> Outcome:
    """Return the outcome of a worker that has sent a message or has ended.

    Args:
        worker: the worker.
        must_be_killed: whether the worker must have been killed by SIGKILL. If True, the outcome of a worker whose
            test passed is "failed".
    """
    try:
        outcome = pickle.loads(worker.channel.recv_bytes())
    except (EOFError, OSError):
        code = worker.process.wait()
        if must_be_killed and code == -signal.SIGKILL:
            return Outcome(kind="killed")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        parts = [f"the process ended {how}", worker.new_output()]
        if worker.output_before:
            parts.append(f"--- printed by this rank before this test ---\n{worker.output_before}")
        return Outcome(kind="failed", text="\n".join(filter(None, parts)))
    assert isinstance(outcome, Outcome)
    if outcome.kind == "failed" and (printed := worker.new_output()):
        return Outcome(kind="failed", text=f"{outcome.text}\n--- printed by this rank ---\n{printed}")
    if outcome.kind == "passed" and must_be_killed:
        text = "expected the process to be killed (SIGKILL), but the test ended normally"
        return Outcome(kind="failed", text=text)
    return outcome


def _abort(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """End a process that hangs. It writes its stacks first."""
    process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + _WRITING_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    process.send_signal(signal.SIGKILL)


def _stacks(worker: _Worker) -> str:
    """Return a text with the thread stacks of a stuck worker and the worker's output."""
    if worker.process.poll() is None:
        worker.process.send_signal(signal.SIGUSR1)  # the worker's faulthandler prints its stacks
        deadline = time.monotonic() + 2.0
        before = size = worker.output.stat().st_size
        is_growing = True
        while time.monotonic() < deadline and (size == before or is_growing):
            time.sleep(0.05)
            is_growing = worker.output.stat().st_size != size
            size = worker.output.stat().st_size
    return f"did not end in time. Its stacks and output:\n{worker.new_output()}"


# ---------------------------------------------------------------------- the address of a job


@contextmanager
def held_port() -> Iterator[int]:
    """Reserve a TCP port of this host, and yield its number. A store can listen at the port inside the context.

    A socket is bound to the port until the context ends. The kernel therefore does not assign the port to a process
    that asks for any free port. On Linux, a second socket can nevertheless bind to this port by its number if both
    sockets set SO_REUSEADDR and neither listens yet. The stores of torch and Syncline set this option. On other
    systems, the port is not reserved. It was free when this function looked.

    Examples:
        >>> from torch.distributed import TCPStore
        >>> with held_port() as port:
        ...     store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        >>> store.port == port
        True
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def variables_of_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for one rank of a job on this host.

    Args:
        rank: the rank.
        size: the number of ranks.
        port: the port at which the store of the job listens.
    """
    return Environment(
        launcher="environment",
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    ).variables()
