"""Forks launchers from a process that has imported torch already: each starts 2 s sooner.

`Server.start` gives what `subprocess.Popen` would of `python -m syncline.tools.cli run ...`: a process of its own,
with its own signals and output. Run as a script, this file is the server.

Of a launcher with `warm_ranks` the ranks are forks, too: of the launcher, in place of `python .../worker.py`. They find
torch imported, and hash strings alike. That is for tests of what ranks do; of how they are started, others.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


@dataclass
class Launcher:
    """A `syncline run` under way."""

    pid: int
    folder: Path

    def wait(self, timeout_seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Its exit code (below 0 for a signal) and output, once it has ended."""
        deadline = time.monotonic() + timeout_seconds
        while not (self.folder / "code").exists():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(
                    f"no end after {timeout_seconds} s; output: {self.output()} {self.error()}"
                )
            time.sleep(0.005)
        code = int((self.folder / "code").read_text())
        return subprocess.CompletedProcess([], code, self.output(), self.error())

    def wait_for_lines(self, num_lines: int, timeout_seconds: float = 60.0) -> list[str]:
        """What it printed so far, once that is so many lines."""
        deadline = time.monotonic() + timeout_seconds
        while len(lines := self.output().splitlines()) < num_lines:
            if time.monotonic() > deadline or (self.folder / "code").exists():
                raise TimeoutError(f"expected {num_lines} lines, got {lines}; {self.error()}")
            time.sleep(0.005)
        return lines

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def error(self) -> str:
        return (self.folder / "error").read_text()


class Server:
    """Starts launchers; use it as a context manager."""

    def __enter__(self) -> Server:
        variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=variables,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
        self._errors.close()

    def start(
        self,
        cwd: Path,
        *arguments: str,
        ignored: Sequence[signal.Signals] = (),
        terminal: str | None = None,
        command: str = "run",
        warm_ranks: bool = False,
    ) -> Launcher:
        """Run `syncline run ARGUMENTS` in `cwd`.

        Args:
            cwd: its working directory; a folder in it gets the output.
            arguments: the command line.
            ignored: signals that it finds ignored, as under nohup.
            terminal: a device that is its stdout and stderr, in place of files.
            command: another one than `run`.
            warm_ranks: its ranks have imported torch when they begin.
        """
        folder = Path(tempfile.mkdtemp(prefix="launcher-", dir=cwd))
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "cwd": str(cwd),
            "ignored": list(ignored),
            "terminal": terminal,
            "command": command,
            "warm_ranks": warm_ranks,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            code = self._process.wait(10)
            self._errors.seek(0)
            raise RuntimeError(f"the server has ended with {code}: {self._errors.read()}") from error
        return Launcher(int(self._process.stdout.readline()), folder)


def serve() -> None:
    import syncline.tools.launch.supervise  # noqa: F401  (with torch: imported once, not by each launcher)
    from syncline.tools.cli import main

    importlib.import_module("torch._dynamo")  # as the first step of an optimizer does
    folders: dict[int, Path] = {}

    def reap(*_: object) -> None:
        for pid, folder in list(folders.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del folders[pid]
                (folder / "code.part").write_text(str(os.waitstatus_to_exitcode(status)))
                (folder / "code.part").rename(folder / "code")

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        for name in ("output", "error"):
            (folder / name).touch()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if not pid:
            code = 70
            try:
                become(folder, request["cwd"], request["ignored"], request["terminal"])
                if request["warm_ranks"]:
                    warm_the_ranks()
                code = main([request["command"], *request["arguments"]])
            finally:
                sys.stdout.flush()
                os._exit(code)
        folders[pid] = folder
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        print(pid, flush=True)


def become(folder: Path, cwd: str, ignored: list[int], terminal: str | None) -> None:
    """In the fork: what a new interpreter finds."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(terminal or folder / name, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY), fd)


# ---------------------------------------------------------------------- ranks that have torch


def warm_the_ranks() -> None:
    """Let this process, a launcher, fork its ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
        pid = os.fork()
        if not pid:
            be_a_rank(args, env, handler._stdout, handler._stderr)
        return ForkedRank(pid)

    SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]


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

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.005)
        return code


def be_a_rank(args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any) -> NoReturn:
    """What `python SCRIPT ARGUMENTS` would be, in a fork."""
    code = 70
    try:
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
        atexit._clear()  # what the launcher wants to do at its end
        gc.freeze()  # what the launcher has
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.argv[:] = args[1:]
        code = exit_code_of_script(args[1])
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def exit_code_of_script(path: str) -> int:
    """Run it, and do with what it raises what the interpreter does."""
    try:
        runpy.run_path(path, run_name="__main__")
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


if __name__ == "__main__":
    serve()
