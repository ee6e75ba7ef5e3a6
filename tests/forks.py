"""Processes that begin with torch imported: forks of one process, the server, which has imported it.

`Forks` starts them. `launch` gives what `subprocess.Popen` would of `python -m syncline run ...`, and `start`
what it would of `python PROGRAM ...`: a process with its own signals, environment and output. `run` starts a program on
several ranks and waits. Run as a script, this file is the server.

The ranks of a launcher with `warm_ranks` are forks too, of the launcher, in place of `python .../worker.py`. They find
torch imported, and all hash strings alike. This is for tests of what ranks do; other tests are of how they start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hangs import FAULTHANDLER, HANG_SECONDS, end_trees
from syncline.session import end_with_parent
from syncline.testing import variables_of_rank

__all__ = ["Forks", "Process", "wait_for_all"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

# ---------------------------------------------------------------------- for tests


@dataclass(frozen=True)
class Process:
    """A process that was started."""

    pid: int
    folder: Path

    @property
    def has_ended(self) -> bool:
        return (self.folder / "code").exists()

    def wait(self, timeout_seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return its exit code (below 0 for a signal) and output.

        If it has not ended in time, it is ended with all that it has started. The error has its output and the stacks.
        """
        [done] = wait_for_all([self], timeout_seconds)
        return done

    def wait_for_lines(self, num_lines: int, timeout_seconds: float = HANG_SECONDS) -> list[str]:
        """Return the lines that it has printed, once there are that many."""
        deadline = time.monotonic() + timeout_seconds
        while len(lines := self.output().splitlines()) < num_lines:
            if time.monotonic() > deadline or self.has_ended:
                self.kill()
                raise TimeoutError(f"expected {num_lines} lines, got {lines}; {self.error()}")
            time.sleep(0.005)
        return lines

    def kill(self) -> None:
        """End it and all that it has started, if it has not ended. Each process prints its stacks."""
        if not self.has_ended:
            end_trees([self.pid])

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def error(self) -> str:
        return (self.folder / "error").read_text()


def wait_for_all(
    processes: Sequence[Process], timeout_seconds: float = HANG_SECONDS, others: Iterable[Process] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Do what `Process.wait` does with ranks that wait for each other.

    If one of them hangs, all are ended, and the others with them. The error has the output of all.
    """
    deadline = time.monotonic() + timeout_seconds
    while not all(process.has_ended for process in processes):
        if time.monotonic() > deadline:
            everyone = {process.pid: process for process in (*processes, *others)}.values()
            end_trees([process.pid for process in everyone if not process.has_ended])
            texts = [f"output: {process.output()} {process.error()}" for process in everyone]
            raise TimeoutError("\n".join([f"no end after {timeout_seconds:g} s", *texts]))
        time.sleep(0.005)
    codes = [int((process.folder / "code").read_text()) for process in processes]
    return [
        subprocess.CompletedProcess([], code, process.output(), process.error())
        for code, process in zip(codes, processes, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the server forks."""

    folder: Path
    """For the output, and for the exit code once it has ended."""
    cwd: Path
    arguments: tuple[str, ...]
    """Of `syncline`, or a program and its arguments."""
    is_program: bool = False
    variables: Mapping[str, str]
    ignored: tuple[signal.Signals, ...] = ()
    terminal: str = ""
    warm_ranks: bool = False
    host: str = ""
    """The network namespace that it enters; "" for none."""


class Forks:
    """Starts processes. The server starts with the first of them, and again after it has failed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until close)

    def launch(
        self,
        cwd: Path,
        *arguments: object,
        command: str = "run",
        ignored: Sequence[signal.Signals] = (),
        terminal: str = "",
        warm_ranks: bool = False,
        host: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """Start `syncline run ARGUMENTS`.

        Args:
            cwd: its working directory; a folder in it gets the output.
            arguments: the command line.
            command: another one than `run`.
            ignored: signals that it ignores from the beginning, as under nohup.
            terminal: a device that is its stdout and stderr, in place of files.
            warm_ranks: its ranks have imported torch when they begin.
            host: the name of one of `SimulatedHosts`, on which it runs; "" for this one.
            variables: more environment variables.
        """
        return self._start(
            cwd,
            command,
            *arguments,
            ignored=tuple(ignored),
            terminal=terminal,
            warm_ranks=warm_ranks,
            host=host,
            variables=variables,
        )

    def start(
        self,
        cwd: Path,
        program: Path,
        *arguments: object,
        variables: Mapping[str, str] | None = None,
        host: str = "",
        warm_ranks: bool = False,
    ) -> Process:
        """Start `python PROGRAM ARGUMENTS` in `cwd`, with more environment variables, perhaps on a simulated host.

        If it is a launcher, its ranks can be warm.
        """
        return self._start(
            cwd,
            program,
            *arguments,
            is_program=True,
            variables=variables,
            host=host,
            warm_ranks=warm_ranks,
        )

    def run(self, num_ranks: int, program: Path, *arguments: object) -> tuple[list[int], str]:
        """Run a program on that many ranks, and return their exit codes and what they have printed."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # The store is the test's, because rank 0 may be killed.
        ranks = [
            variables_of_rank(rank, num_ranks, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            for rank in range(num_ranks)
        ]
        with tempfile.TemporaryDirectory() as folder:
            started = [self.start(Path(folder), program, *arguments, variables=rank) for rank in ranks]
            try:
                ended = wait_for_all(started)
            finally:
                for process in started:
                    process.kill()
        return [one.returncode for one in ended], "".join(one.stdout + one.stderr for one in ended)

    def close(self) -> None:
        """End the server, once everything that it has started has ended or is killed."""
        if self._server is not None:
            assert self._channel is not None
            self._channel.close()
            self._server.kill()
            self._server.wait()
            self._server = None
        self._errors.close()

    def _start(
        self, cwd: Path, *arguments: object, variables: Mapping[str, str] | None = None, **how: Any
    ) -> Process:
        folder = Path(tempfile.mkdtemp(prefix="process-", dir=cwd))
        for name in ("output", "error"):
            (folder / name).touch()
        outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        request = Request(
            folder=folder,
            cwd=cwd,
            arguments=tuple(map(str, arguments)),
            variables=outside | FAULTHANDLER | dict(variables or {}),
            **how,
        )
        channel = self._channel_to_server()
        try:
            channel.send(request)
            return Process(channel.recv(), folder)
        except (EOFError, OSError) as error:
            assert self._server is not None
            code, self._server = self._server.wait(HANG_SECONDS), None
            self._errors.seek(0)
            raise RuntimeError(f"the server has ended with {code}: {self._errors.read()}") from error

    def _channel_to_server(self) -> Connection:
        if self._server is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=self._errors,
                )
            self._channel = Connection(ours.detach())
        assert self._channel is not None
        return self._channel


# ---------------------------------------------------------------------- the server


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended stays in /proc until its parent has asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def serve(channel: Connection) -> None:
    """Fork processes on request, and write the exit codes of those that have ended, until the channel is closed."""
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    folders: dict[int, Path] = {}
    server_pid = os.getpid()
    while True:
        ready = wait([channel, ended])
        if ended in ready:
            os.read(ended, 4096)
            # Not in the handler of the signal: one that interrupts another would wait for the same process twice.
            for pid in [pid for pid in folders if write_code(pid, folders[pid])]:
                del folders[pid]
        if channel in ready:
            try:
                request: Request = channel.recv()
            except EOFError:
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            pid = os.fork()
            if not pid:
                leave(partial(be, request, server_pid))
            folders[pid] = request.folder
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            channel.send(pid)


def write_code(pid: int, folder: Path) -> bool:
    """Write the exit code if the process has ended, and return whether it has."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        with contextlib.suppress(FileNotFoundError):  # nothing waits for it any more
            (folder / "code.part").write_text(str(os.waitstatus_to_exitcode(status)))
            (folder / "code.part").rename(folder / "code")
    return bool(ended)


def leave(main: Callable[[], int]) -> NoReturn:
    """Run it in a fork, and end as an interpreter does."""
    code = 70
    try:
        code = main()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def be(request: Request, server_pid: int) -> int:
    """In the fork: what a new interpreter would be."""
    end_with_parent(server_pid)
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for fd, name in ((1, "output"), (2, "error")):
        path = request.terminal or request.folder / name
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        os.dup2(file, fd)
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.variables)
    if request.host:
        enter(request.host)
    if request.warm_ranks:
        warm_the_ranks()
    faulthandler.enable()
    if request.is_program:
        return exit_code_of_script(request.arguments)
    from syncline.tools.cli import main

    return main([*request.arguments])


def enter(host: str) -> None:
    """Make this process one of the host's, as `ip netns exec` and `unshare --uts` would, with mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    network, mounts, names = 0x40000000, 0x00020000, 0x04000000  # CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS
    with open(f"/var/run/netns/{host}") as namespace:
        failed = libc.setns(namespace.fileno(), network) or libc.unshare(mounts | names)
    if failed:
        raise OSError(ctypes.get_errno(), f"this process cannot enter {host}")
    socket.sethostname(host)
    subprocess.run(["mount", "--make-rslave", "/"], check=True)


def exit_code_of_script(argv: Sequence[str]) -> int:
    """Run `python ARGV`, and do with what it raises what the interpreter does."""
    atexit._clear()  # what the parent does at its end
    gc.freeze()  # what the parent has
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


# ---------------------------------------------------------------------- ranks that have torch


def warm_the_ranks() -> None:
    """Make this process, a launcher, fork what would be a new interpreter."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
        argv = args[2:] if args[1] == "-u" else args[1:]  # torchrun's way
        return forked_rank(argv, env, handler._stdout, handler._stderr)

    SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]


def forked_rank(
    argv: tuple[str, ...], env: dict[str, str], stdout: Any = None, stderr: Any = None
) -> ForkedRank:
    with warnings.catch_warnings():  # since Python 3.12: this process has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        leave(partial(be_a_rank, argv, env, stdout, stderr))
    return ForkedRank(pid)


class ForkedRank:
    """With what torch's launcher and ours ask of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.005)
        return code


def be_a_rank(argv: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any) -> int:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), fd)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    return exit_code_of_script(argv)


if __name__ == "__main__":
    end_with_parent()
    torch.set_num_threads(1)
    # Imported once, not in each fork: by the launcher, and by the first step of an optimizer.
    for slow in (
        "syncline.tools.launch.supervise",
        "syncline.tools.cli",
        "syncline.ddp.wrapper",
        "torch._dynamo",
    ):
        importlib.import_module(slow)
    serve(Connection(int(sys.argv[1])))
