"""A warm pool of rank processes: started once, torch imported once, a fresh process group for each test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "RankPool", "Task"]

_GRACE_SECONDS = 5.0
"""How long the other ranks may take to end after one has failed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One test function on one rank. Sent to our own child through an inherited socket."""

    module: str
    qualname: str
    arguments: dict[str, Any]
    rank: int
    size: int
    store_path: str
    timeout_seconds: float
    warning_filters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended: "passed", "skipped", "failed" or "stuck"."""

    kind: str
    text: str = ""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection
    output: Path
    output_from: int = field(default=0)

    def new_output(self) -> str:
        """What the worker has printed since the last call."""
        with self.output.open("rb") as file:
            file.seek(self.output_from)
            data = file.read()
        self.output_from += len(data)
        return data.decode(errors="replace").strip()

    def end(self, *, patience_seconds: float) -> None:
        with contextlib.suppress(OSError):
            self.channel.close()  # an idle worker sees the end of its channel and leaves
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankPool:
    """Runs functions on n processes at once. Workers are started when first needed and used again."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-ranks-")
        self._num_started = 0
        self._num_tasks = 0

    def run(self, tasks: list[Task]) -> list[Outcome]:
        """Run one task on each rank and return their outcomes, in rank order.

        A rank that does not end before its deadline, or soon after another rank failed, is "stuck": its stacks
        are part of the outcome, its process is killed and replaced.
        """
        while len(self._workers) < len(tasks):
            self._workers.append(self._start())
        workers = self._workers[: len(tasks)]
        for worker, task in zip(workers, tasks, strict=True):
            worker.new_output()
            worker.channel.send(task)
        outcomes = self._collect(workers, tasks[0].timeout_seconds)
        for worker, outcome in zip(workers, outcomes, strict=True):
            if outcome.kind == "stuck" or worker.process.poll() is not None:
                worker.end(patience_seconds=0.0)
                self._workers.remove(worker)
        return outcomes

    def store_path(self) -> str:
        """A new file for the ranks of one test to find each other through."""
        self._num_tasks += 1
        return os.path.join(self._folder.name, f"store-{self._num_tasks}")

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.close()
        for worker in self._workers:
            worker.end(patience_seconds=2.0)
        self._workers.clear()
        self._folder.cleanup()

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        self._num_started += 1
        output = Path(self._folder.name) / f"worker-{self._num_started}.log"
        with theirs, output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "syncline.testing.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the controller, which ends its workers itself.
                start_new_session=True,
            )
        channel = Connection(ours.detach())
        channel.send(list(sys.path))
        return _Worker(process, channel, output)

    def _collect(self, workers: list[_Worker], timeout_seconds: float) -> list[Outcome]:
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
                outcomes[rank] = self._receive(workers[rank])
                if outcomes[rank].kind == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for rank in channels.values():
            outcomes[rank] = Outcome(kind="stuck", text=_stacks(workers[rank]))
        return [outcomes[rank] for rank in range(len(workers))]

    def _receive(self, worker: _Worker) -> Outcome:
        try:
            outcome = worker.channel.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return Outcome(kind="failed", text=f"the process ended {how}\n{worker.new_output()}")
        assert isinstance(outcome, Outcome)
        if outcome.kind == "failed" and (printed := worker.new_output()):
            return Outcome(kind="failed", text=f"{outcome.text}\n--- printed by this rank ---\n{printed}")
        return outcome


def _stacks(worker: _Worker) -> str:
    """Where the threads of a stuck worker are."""
    if worker.process.poll() is None:
        worker.process.send_signal(signal.SIGUSR1)  # the worker's faulthandler prints its stacks
        deadline = time.monotonic() + 1.0
        size = -1
        while time.monotonic() < deadline and worker.output.stat().st_size != size:
            size = worker.output.stat().st_size
            time.sleep(0.05)
    return f"did not end in time; its stacks and output:\n{worker.new_output()}"
