"""A process that has imported what a rank needs, and forks ranks: one starts within milliseconds.

This is the pool's end of it; what the process does is in `worker.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

__all__ = ["FORKS", "WORKER", "ForkedProcess", "Request", "Template"]

WORKER = "syncline.testing.worker"
FORKS = "--fork"


class Request(NamedTuple):
    """What the pool asks of it."""

    verb: Literal["fork", "poll", "wait"]
    pid: int = 0
    output: str = ""


class Template:
    """The process. May be used from several threads.

    Args:
        output: the file to which it prints, if something goes wrong.
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
                # Ctrl-C is for the controller, which ends its workers itself.
                start_new_session=True,
            )
        self._channel = Connection(ours.detach())
        self._lock = Lock()

    def fork(self, channel: socket.socket, output: Path) -> ForkedProcess:
        """A new worker, which is told what to do by `channel`, and prints to the file `output`."""
        pid = self._ask(Request("fork", output=str(output)), channel)
        assert pid is not None
        return ForkedProcess(self, pid)

    def exit_code(self, pid: int, *, waits: bool) -> int | None:
        """Of a worker, as `subprocess` counts; None if it goes on, unless asked to wait for its end."""
        return self._ask(Request("wait" if waits else "poll", pid))

    def close(self) -> None:
        """End it, and by that its workers."""
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
        """Its exit code if it has ended."""
        if self._exit_code is None:
            self._exit_code = self._template.exit_code(self.pid, waits=False)
        return self._exit_code

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self._exit_code is None:
            self._exit_code = self._template.exit_code(self.pid, waits=True)
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send it if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)  # not another process of this number: ours was not waited for yet

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
