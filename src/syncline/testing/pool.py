"""A warm pool of rank processes: torch is already imported, and each test gets a fresh process group.

Ranks are forked from templates: processes that have imported everything a rank needs. A fork takes milliseconds.
There are two templates, for even and for odd ranks, because processes that were started separately have different
string hashes. Behavior that depends on the order of a set therefore differs between ranks here as well.

This file is the pool's side; the processes run `worker.py`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from syncline.testing.ports import held_port

WORKER = "syncline.testing.worker"

FORKS = "--fork"


class Request(NamedTuple):
    """A request of the pool to a template."""

    verb: Literal["fork", "poll", "wait"]
    pid: int = 0
    output: str = ""


class Template:
    """A process that forks workers. May be used from several threads.

    Args:
        output: the file to which the process prints errors.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        ours, theirs = socket.socketpair()
        with theirs, output.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno()), FORKS],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is handled by the controller, which ends its workers.
                start_new_session=True,
            )
        self._channel = Connection(ours.detach())
        self._lock = Lock()

    def fork(self, channel: socket.socket, output: Path) -> ForkedProcess:
        """Fork a new worker, which receives its tasks through `channel` and prints to the file `output`."""
        pid = self._ask(Request("fork", output=str(output)), channel)
        assert pid is not None
        return ForkedProcess(self, pid)

    def exit_code(self, pid: int, *, waits: bool) -> int | None:
        """Return a worker's exit code, as in `subprocess`; None if it is running and `waits` is False."""
        return self._ask(Request("wait" if waits else "poll", pid))

    def close(self) -> None:
        """End the template, which ends its workers too."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Request, handle: socket.socket | None = None) -> int | None:
        try:
            with self._lock:
                self._channel.send(request)
                if handle is not None:
                    send_handle(self._channel, handle.fileno(), self._process.pid)
                answer: int | None = self._channel.recv()
        except (EOFError, OSError) as error:
            printed = self._output.read_text(errors="replace")
            raise RuntimeError(f"the process that starts the ranks has ended:\n{printed}") from error
        return answer


class ForkedProcess:
    """A worker, with the methods of `subprocess.Popen` that the pool needs."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self._exit_code: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code if the process has ended, else None."""
        if self._exit_code is None:
            self._exit_code = self._template.exit_code(self.pid, waits=False)
        return self._exit_code

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        if self._exit_code is None:
            self._exit_code = self._template.exit_code(self.pid, waits=True)
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)  # the id cannot be reused yet, because our child was not waited for

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


_CAN_FORK = sys.platform == "linux"
"""Whether workers are forked. On macOS, libraries that torch needs do not work in a forked child."""

_NUM_KINDS = 2

_START_SECONDS = 300.0
"""Limit for the start of a worker, even on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One test function on one rank. It is sent to our own child through an inherited socket."""

    module: str
    qualname: str
    arguments: dict[str, Any]
    rank: int
    size: int
    store_path: str
    timeout_seconds: float
    warning_filters: tuple[str, ...] = ()
    master_port: int = 0
    """The port of the store for all ranks, set by the pool when they begin."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a task: "passed", "skipped", "xfailed", "failed", "killed" (its process) or "stuck"."""

    kind: str
    text: str = ""


@dataclass
class _Worker:
    number: int
    """Number of the worker in the order of their starts, from 1."""
    process: subprocess.Popen[bytes] | ForkedProcess
    channel: Connection
    output: Path
    output_from: int = 0
    output_before: str = ""
    """Output printed before the task, for example after the last one. It may explain why a worker died since then."""
    is_ready: bool = False

    def new_output(self) -> str:
        """Return the worker's output since the last call."""
        with self.output.open("rb") as file:
            file.seek(self.output_from)
            data = file.read()
        self.output_from += len(data)
        return data.decode(errors="replace").strip()

    def send(self, message: object) -> None:
        # Plain pickle, because torch would send tensors as descriptors of shared memory, and the worker would need this
        # process's key to open them.
        with contextlib.suppress(
            OSError
        ):  # if the worker has died, this is detected when its outcome is awaited
            self.channel.send_bytes(pickle.dumps(message))

    def wait_ready(self) -> None:
        if not self.is_ready:
            try:
                if not self.channel.poll(_START_SECONDS):
                    raise TimeoutError
                self.channel.recv_bytes()
            except (EOFError, OSError) as error:
                raise RuntimeError(f"a rank process did not start:\n{self.new_output()}") from error
            self.is_ready = True

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


class RankPool:
    """A pool that runs functions on n processes at once. Workers are started when first needed and reused.

    Several threads may run tasks at once; each uses separate workers.

    Args:
        grace_seconds: how long the other ranks may take to end after one has failed.
    """

    def __init__(self, grace_seconds: float = 5.0) -> None:
        self._grace_seconds = grace_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-ranks-")
        self._lock = Lock()
        self._num_started = 0
        self._num_tasks = 0
        self._idle: tuple[list[_Worker], ...] = tuple([] for _ in range(_NUM_KINDS))
        self._templates = [
            Template(Path(self._folder.name) / f"template-{kind}.log")
            for kind in range(_NUM_KINDS if _CAN_FORK else 0)
        ]

    def run(self, tasks: list[Task], killed: Collection[int] = ()) -> list[Outcome]:
        """Run one task on each rank and return their outcomes, in rank order.

        Args:
            tasks: one for each rank.
            killed: the ranks whose process must be killed (SIGKILL) during the task.

        A rank that does not end before its deadline, or soon after another rank failed, is "stuck". Its stacks are part
        of the outcome. The processes of a failed test are killed, because their state is unknown.
        """
        with held_port() as port:
            return self._run([replace(task, master_port=port) for task in tasks], killed)

    def _run(self, tasks: list[Task], killed: Collection[int]) -> list[Outcome]:
        workers = [self._take(rank % _NUM_KINDS) for rank in range(len(tasks))]
        outcomes: list[Outcome] = []
        try:
            for worker in workers:
                worker.wait_ready()
                worker.output_before = worker.new_output()
            for worker, task in zip(workers, tasks, strict=True):
                worker.send(task)
            outcomes = self._collect(workers, tasks[0].timeout_seconds, killed)
        finally:
            is_sound = outcomes and not {"failed", "stuck"} & {outcome.kind for outcome in outcomes}
            for rank, worker in enumerate(workers):
                if is_sound and worker.process.poll() is None:
                    worker.send("all ranks have ended")
                    self._give_back(worker, rank % _NUM_KINDS)
                else:
                    worker.kill()
        return outcomes

    def tasks(
        self,
        size: int,
        *,
        module: str,
        qualname: str,
        arguments: dict[str, Any],
        timeout_seconds: float,
        warning_filters: tuple[str, ...],
    ) -> list[Task]:
        """Return the same task for each of `size` ranks, which connect through a new file store."""
        with self._lock:
            self._num_tasks += 1
            store_path = os.path.join(self._folder.name, f"store-{self._num_tasks}")
        return [
            Task(
                module=module,
                qualname=qualname,
                arguments=arguments,
                rank=rank,
                size=size,
                store_path=store_path,
                timeout_seconds=timeout_seconds,
                warning_filters=warning_filters,
            )
            for rank in range(size)
        ]

    def close(self) -> None:
        """End all workers. They are idle, so nothing is lost."""
        for workers in self._idle:
            for worker in workers:
                worker.kill()
            workers.clear()
        for template in self._templates:
            template.close()
        self._folder.cleanup()

    def _give_back(self, worker: _Worker, kind: int) -> None:
        """Make a worker available again. The oldest is taken first, so that a rank keeps its process from test to test.

        Counters within a process (torch's RPC counts how often it was started) are then equal on the ranks.
        """
        with self._lock:
            self._idle[kind].append(worker)
            self._idle[kind].sort(key=lambda worker: worker.number)

    def _take(self, kind: int) -> _Worker:
        """Return the oldest idle worker, or a new one."""
        with self._lock:
            if self._idle[kind]:
                return self._idle[kind].pop(0)
            self._num_started += 1
            number = self._num_started
            output = Path(self._folder.name) / f"worker-{number}.log"
        ours, theirs = socket.socketpair()
        with theirs, output.open("wb") as log:
            process = (
                self._templates[kind].fork(theirs, output)
                if self._templates
                else subprocess.Popen(
                    [sys.executable, "-m", WORKER, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # as in `Template`
                )
            )
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
            parts.append(
                f"--- printed before this test, by the end of the last one, say ---\n{worker.output_before}"
            )
        return Outcome(kind="failed", text="\n".join(filter(None, parts)))
    assert isinstance(outcome, Outcome)
    if outcome.kind == "failed" and (printed := worker.new_output()):
        return Outcome(kind="failed", text=f"{outcome.text}\n--- printed by this rank ---\n{printed}")
    if outcome.kind == "passed" and must_be_killed:
        return Outcome(kind="failed", text="ended on its own, but should have been killed")
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
    return f"did not end in time; its stacks and output:\n{worker.new_output()}"
