"""MPIs as competitors in benchmarks, and facts about this machine.

An MPI runs in a separate process tree. It gets a request for each of its turns, and sleeps between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from syncline.tools.bench.timing import Timer
from syncline.transport.base import Transport

_PEER = Path(__file__).with_name("mpi_peer.py")

_START_SECONDS = 60.0

_ANSWER_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class MPI:
    """An installed MPI."""

    name: str
    """Name and version: "Open MPI 5.0.11", say."""
    python: str
    """Path of a Python whose mpi4py uses this MPI."""
    mpiexec: str
    """Path of the program that starts its ranks."""

    def command(self, num_ranks: int, socket_path: str) -> list[str]:
        """Return the command that starts the ranks of the measurement."""
        options: list[str] = []
        if self.name.startswith("Open MPI"):
            options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        return [self.mpiexec, *options, "-n", str(num_ranks), self.python, str(_PEER), socket_path]


def short_name(version: str) -> str:
    """Shorten the result of `MPI_Get_library_version` to two or three words.

    Example:
        >>> short_name("Open MPI v5.0.11, package: Open MPI user@localhost Distribution")
        'Open MPI 5.0.11'
        >>> short_name("MPICH Version:      5.0.2")
        'MPICH 5.0.2'
        >>> short_name("Intel(R) MPI Library 2021.18 for Linux* OS")
        'Intel MPI 2021.18'
    """
    first = version.strip().splitlines()[0] if version.strip() else "MPI"
    number = re.search(r"\d+(\.\d+)+", first)
    for mark, name in (("Open MPI", "Open MPI"), ("Intel", "Intel MPI"), ("MPICH", "MPICH")):
        if mark in first:
            return f"{name} {number.group()}" if number else name
    return first[:24]


def find_mpi(python: str) -> MPI:
    """Return the MPI that this Python's mpi4py uses.

    Raises:
        ValueError: there is none, or it does not work; the text has the reason.
    """
    code = "from mpi4py import MPI; import numpy; print(MPI.Get_library_version())"
    try:
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python}: {error}") from None
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise ValueError(f"mpi4py does not work with {python}: {last[0]}")
    beside = Path(python).with_name("mpiexec")
    mpiexec = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if mpiexec is None:
        raise ValueError(f"mpi4py works with {python}, but no mpiexec was found next to it or on PATH")
    return MPI(name=short_name(asked.stdout), python=python, mpiexec=mpiexec)


class MPIPeer:
    """The ranks of one MPI, started by one of our ranks; a context manager.

    Raises:
        RuntimeError: they did not start, or ended early; the text has their last output.
    """

    def __init__(self, mpi: MPI, *, num_ranks: int) -> None:
        self.mpi = mpi
        self._folder = tempfile.TemporaryDirectory(prefix="syncline_mpi_", ignore_cleanup_errors=True)
        self._connections: list[socket.socket] = []
        self._lines: list[TextIO] = []
        path = str(Path(self._folder.name) / "turn")
        self._words = (Path(self._folder.name) / "words").open("w+")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(num_ranks)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                mpi.command(num_ranks, path),
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
            )
            try:
                self._meet(listener, num_ranks)
            except BaseException:
                self.close()
                raise

    def _meet(self, listener: socket.socket, num_ranks: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._connections) < num_ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self._error("its ranks did not start") from None
                continue
            connection.settimeout(_ANSWER_SECONDS)
            self._connections.append(connection)
            self._lines.append(connection.makefile("rw", encoding="utf-8"))
        sizes = {hello["size"] for hello in self._answers()}
        if sizes != {num_ranks}:
            raise self._error(f"expected {num_ranks} ranks in one world, got worlds of {sorted(sizes)}")

    def __enter__(self) -> MPIPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self, numel: int) -> None:
        """Let the ranks reduce this many fp32 elements from now on."""
        self._say({"numel": numel})
        if not all(answer["is_right"] for answer in self._answers()):
            raise self._error("its sum is wrong")

    def seconds_for(self, num_calls: int, op: Literal["sum", "mean"]) -> float:
        """Return the time of this many reductions on the slowest of its ranks."""
        self._say({"op": op, "calls": num_calls})
        return float(max(answer["seconds"] for answer in self._answers()))

    def timer(self, op: Literal["sum", "mean"], transport: Transport) -> Timer:
        """Return a timer of this MPI, for the rank that started it."""

        def seconds_for(num_calls: int) -> float:
            transport.barrier().wait()
            return self.seconds_for(num_calls, op)

        return seconds_for

    def close(self) -> None:
        """End the ranks of the MPI."""
        for lines, connection in zip(self._lines, self._connections, strict=True):
            with contextlib.suppress(OSError):
                lines.close()
            connection.close()
        self._connections, self._lines = [], []
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
            if signal_number is not None:
                self._process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
                break
        self._words.close()
        self._folder.cleanup()

    def _say(self, request: dict[str, object]) -> None:
        try:
            for lines in self._lines:
                lines.write(json.dumps(request) + "\n")
                lines.flush()
        except OSError:
            raise self._error("it ended early") from None

    def _answers(self) -> list[dict[str, Any]]:
        try:
            lines = [lines.readline() for lines in self._lines]
        except OSError as error:
            raise self._error(f"no answer ({error})") from None
        if not all(lines):
            raise self._error("it ended early")
        return [json.loads(line) for line in lines]

    def _error(self, what: str) -> RuntimeError:
        self._words.seek(0)
        words = " ".join(self._words.read().split())[-400:]
        return RuntimeError(f"{self.mpi.name}: {what}" + (f"; it said: {words}" if words else ""))
