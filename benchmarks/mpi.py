"""Classes that make an installed MPI a competitor in benchmarks.

The ranks of an MPI run in separate processes. They receive a request for each of their turns, and sleep between turns.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from syncline.tools.bench.timing import Timer
from syncline.transport.base import Transport

_PEER = Path(__file__).with_name("mpi_peer.py")

_START_SECONDS = 60.0

_REPLY_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class MPI:
    """An MPI that is installed on this host."""

    name: str
    """The name and version, for example "Open MPI 5.0.11"."""
    python: str
    """The path of a Python interpreter whose mpi4py uses this MPI."""
    mpiexec: str
    """The path of the program that starts the ranks of this MPI."""

    def command(self, num_ranks: int, socket_path: str) -> list[str]:
        """Return the command that starts `num_ranks` ranks of this MPI. They connect to the socket at `socket_path`."""
        options: list[str] = []
        if self.name.startswith("Open MPI"):
            options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        return [self.mpiexec, *options, "-n", str(num_ranks), self.python, "-P", str(_PEER), socket_path]


def short_name(version: str) -> str:
    """Shorten the result of `MPI_Get_library_version` to the name of the MPI and its version.

    Examples:
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
    """Return the MPI that the package mpi4py of a Python interpreter uses.

    Args:
        python: the path of the interpreter.

    Raises:
        ValueError: this interpreter has no working mpi4py, or there is no mpiexec. The text gives the reason.
    """
    code = "from mpi4py import MPI; import numpy; print(MPI.Get_library_version())"
    try:
        version = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"could not find out which MPI the mpi4py of {python} uses: {error}") from None
    if version.returncode:
        last = version.stderr.strip().splitlines()[-1:] or [f"exit code {version.returncode}"]
        raise ValueError(f"mpi4py does not work with {python}: {last[0]}")
    beside = Path(python).with_name("mpiexec")
    mpiexec = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if mpiexec is None:
        raise ValueError(
            f"mpi4py works with {python}, but there is no mpiexec in the folder of this Python or on PATH: add the "
            "folder of mpiexec to PATH"
        )
    return MPI(name=short_name(version.stdout), python=python, mpiexec=mpiexec)


class MPIPeer:
    """The running ranks of one MPI. One of Syncline's ranks starts these ranks when it creates this object.

    The object is a context manager, which ends the ranks.

    Args:
        mpi: the MPI.
        num_ranks: the number of ranks of the MPI.

    Raises:
        RuntimeError: the ranks of the MPI did not start, or ended early. The text includes their last output.
    """

    def __init__(self, mpi: MPI, *, num_ranks: int) -> None:
        self.mpi = mpi
        self._folder = tempfile.TemporaryDirectory(prefix="syncline_mpi_", ignore_cleanup_errors=True)
        self._connections: list[Connection] = []
        path = str(Path(self._folder.name) / "socket")
        self._output = (Path(self._folder.name) / "output").open("w+")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(num_ranks)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                mpi.command(num_ranks, path),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
            )
            try:
                self._connect(listener, num_ranks)
            except BaseException:
                self.close()
                raise

    def _connect(self, listener: socket.socket, num_ranks: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._connections) < num_ranks:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self._error("its ranks did not start") from None
                continue
            self._connections.append(Connection(accepted.detach()))
        sizes = set(self._receive())
        if sizes != {num_ranks}:
            raise self._error(
                f"expected an MPI world of {num_ranks} ranks, got worlds of these sizes: {sorted(sizes)}"
            )

    def __enter__(self) -> MPIPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, numel: int) -> None:
        """Set the number of fp32 elements that the ranks of the MPI reduce in later calls.

        Raises:
            RuntimeError: the result of a test reduction is wrong.
        """
        if not all(self._ask("prepare", numel)):
            raise self._error("the result of its all_reduce is wrong")

    def seconds_for(self, num_calls: int, op: Literal["sum", "mean"]) -> float:
        """Let the MPI perform `num_calls` reductions. Return their total time on its slowest rank, in seconds."""
        return float(max(self._ask(op, num_calls)))

    def timer(self, op: Literal["sum", "mean"], transport: Transport) -> Timer:
        """Return a timer of this MPI's reductions. It is for Syncline's rank 0, which started the MPI."""

        def seconds_for(num_calls: int) -> float:
            transport.barrier().wait()
            return self.seconds_for(num_calls, op)

        return seconds_for

    def close(self) -> None:
        """End the ranks of the MPI, and remove their temporary files."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        for end in (self._process.poll, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
                break
        self._output.close()
        self._folder.cleanup()

    def _ask(self, request: str, number: int) -> list[Any]:
        """Send a request to all ranks of the MPI, and return their replies."""
        try:
            for connection in self._connections:
                connection.send((request, number))
        except OSError:
            raise self._error("it ended early") from None
        return self._receive()

    def _receive(self) -> list[Any]:
        try:
            if not all(connection.poll(_REPLY_SECONDS) for connection in self._connections):
                raise self._error(f"no reply within {_REPLY_SECONDS:.0f} s")
            return [connection.recv() for connection in self._connections]
        except (EOFError, OSError):
            raise self._error("it ended early") from None

    def _error(self, problem: str) -> RuntimeError:
        self._output.seek(0)
        output = " ".join(self._output.read().split())[-400:]
        return RuntimeError(
            f"{self.mpi.name}: {problem}" + (f"; its last output: {output}" if output else "")
        )
