"""A warm pool of rank processes. They have already imported torch, and each test gets a fresh process group.

Ranks are forked from templates. A template is a process that has imported everything a rank needs, so that a fork takes
milliseconds. There are two templates, for even and for odd ranks, because processes that were started separately have
different string hashes. Behavior that depends on the order of a set therefore differs between ranks in tests, too.

This file runs in the process of pytest. The rank processes run `worker.py`.
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
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any

from syncline.testing.ports import held_port, variables_of_rank

WORKER = "syncline.testing.worker"

FORKS = "--fork"


_POLL_SECONDS = 0.002


def _start(channel: socket.socket, output: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `worker.py` and prints to the file `output`."""
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, str(channel.fileno()), *options],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach pytest only, which then ends the workers
        )


class Template:
    """A process that forks workers. Several threads may use a template.

    Args:
        output: the file to which the process prints errors.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs, output, FORKS)
        self._channel = Connection(ours.detach())
        self._lock = Lock()

    def fork(self, channel: socket.socket, output: Path) -> ForkedProcess:
        """Fork a new worker, which receives its tasks through `channel` and prints to the file `output`."""
        pid = self.ask(str(output), channel)
        assert pid is not None
        return ForkedProcess(self, pid)

    def close(self) -> None:
        """End the template. Its workers then end as well."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def ask(self, request: str | int, handle: socket.socket | None = None) -> int | None:
        """Send a request to the process, and return the reply.

        Args:
            request: the path of an output file, to fork a worker that prints there. Or the process number of a worker,
                to get its exit code, which is None if the worker has not ended.
            handle: the channel of the new worker.
        """
        try:
            with self._lock:
                self._channel.send(request)
                if handle is not None:
                    send_handle(self._channel, handle.fileno(), self._process.pid)
                answer: int | None = self._channel.recv()
        except (EOFError, OSError) as error:
            printed = self._output.read_text(errors="replace")
            raise RuntimeError(
                f"the process from which ranks are forked has ended. Its output:\n{printed}"
            ) from error
        return answer


class ForkedProcess:
    """A worker, with the methods of `subprocess.Popen` that the pool needs."""

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
        """Wait for the end of the process and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process has not ended."""
        if self.poll() is None:
            os.kill(
                self.pid, number
            )  # the number cannot be reused yet, because the template has not waited for it

    def kill(self) -> None:
        """Send SIGKILL if the process has not ended."""
        self.send_signal(signal.SIGKILL)


_CAN_FORK = sys.platform == "linux"
"""Whether workers are forked. On macOS, libraries that torch needs do not work in a forked child."""

_NUM_KINDS = 2

_START_SECONDS = 300.0
"""How long the start of a worker may take, even on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A test function that all ranks run."""

    module: str
    """Name of the module that defines the function."""
    qualname: str
    """Name of the function in its module, with its class, if it has one."""
    arguments: dict[str, Any]
    """Arguments of the function by name. They are pickled."""
    timeout_seconds: float
    """Time after which a rank that has not ended is "stuck"."""
    warning_filters: tuple[str, ...] = ()
    """Filters as in pytest's configuration."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a task on one rank."""

    kind: str
    """One of "passed", "skipped", "xfailed", "failed", "stuck" and "killed" (the process of the rank)."""
    text: str = ""
    """The reason, unless the task has passed."""


@dataclass
class _Worker:
    number: int
    """Number of the worker in the order of their starts, from 1."""
    process: subprocess.Popen[bytes] | ForkedProcess
    channel: Connection
    output: Path
    output_from: int = 0
    output_before: str = ""
    """Output that the worker printed before this task. It may explain why the worker has died since the last task."""
    is_ready: bool = False

    def new_output(self) -> str:
        """Return the worker's output since the last call."""
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
                    raise TimeoutError
                self.channel.recv_bytes()
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"a rank process did not start. Its output:\n{self.new_output()}"
                ) from error
            self.is_ready = True

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


class RankPool:
    """A pool that runs functions on n processes at once. Workers are started when first needed and reused.

    Several threads may run tasks at once. Each thread uses separate workers.

    Args:
        grace_seconds: how long the other ranks may take to end after one has failed.
    """

    def __init__(self, grace_seconds: float = 5.0) -> None:
        self._grace_seconds = grace_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-ranks-")
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._idle: tuple[list[_Worker], ...] = tuple([] for _ in range(_NUM_KINDS))
        self._templates = [
            Template(Path(self._folder.name) / f"template-{kind}.log")
            for kind in range(_NUM_KINDS if _CAN_FORK else 0)
        ]

    def run(self, size: int, task: Task, killed: Collection[int] = ()) -> list[Outcome]:
        """Run a task on each of `size` ranks, which form a process group. Return their outcomes, in rank order.

        Args:
            size: the number of ranks.
            task: the task.
            killed: the ranks whose process must be killed (SIGKILL) during the task.

        A rank that does not end before its deadline, or soon after another rank failed, is "stuck". Its stacks are part
        of the outcome. The processes of a failed test are killed, because their state is unknown.
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
        """End all workers. Call this when no task is running."""
        for workers in self._idle:
            for worker in workers:
                worker.kill()
            workers.clear()
        for template in self._templates:
            template.close()
        self._folder.cleanup()

    def _give_back(self, worker: _Worker, kind: int) -> None:
        """Make a worker available again.

        The oldest idle worker is taken first, so that a rank keeps its process from test to test. Counters within a
        process are then equal on the ranks. For example, torch's RPC counts its starts.
        """
        with self._lock:
            self._idle[kind].append(worker)
            self._idle[kind].sort(key=lambda worker: worker.number)

    def _take(self, kind: int) -> _Worker:
        """Return the oldest idle worker, or a new one."""
        with self._lock:
            if self._idle[kind]:
                return self._idle[kind].pop(0)
        number = next(self._numbers)
        output = Path(self._folder.name) / f"worker-{number}.log"
        output.touch()
        ours, theirs = socket.socketpair()
        with theirs:
            template = self._templates[kind] if self._templates else None
            process = _start(theirs, output) if template is None else template.fork(theirs, output)
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
    """Return the outcome of a worker whose channel is ready."""
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
        return Outcome(
            kind="failed", text="expected the process to be killed (SIGKILL), but the test ended normally"
        )
    return outcome


def _stacks(worker: _Worker) -> str:
    """Return the stacks of a stuck worker's threads, with its output."""
    if worker.process.poll() is None:
        worker.process.send_signal(signal.SIGUSR1)  # the worker's faulthandler prints its stacks
        deadline = time.monotonic() + 1.0
        size = -1
        while time.monotonic() < deadline and worker.output.stat().st_size != size:
            size = worker.output.stat().st_size
            time.sleep(0.05)
    return f"did not end in time. Its stacks and output:\n{worker.new_output()}"
