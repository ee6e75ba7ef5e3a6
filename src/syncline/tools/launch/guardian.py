"""The guardian, a process that cleans up if the launcher is killed.

It then kills the ranks' child processes, and removes the launcher's private folder.

[Note: why another process]

SIGKILL ends the launcher before the launcher can clean up. The kernel then kills the ranks (see
`process.end_with_parent`), but not their child processes, such as workers of a DataLoader. The kernel does not remove
the launcher's folder either. A small process in a session of its own, the guardian, therefore reads from a pipe. Only
the launcher holds the other end of the pipe open. If the pipe closes without a final message, the launcher was killed,
and the guardian kills all processes in the sessions of the ranks. A process that has left its rank's session by setsid
was detached on purpose, and the guardian does not kill it.

After a rank has ended, the system can give its process number to another process. For ranks that ended before the
launcher, the guardian therefore kills only processes that have the job's mark in their environment.

This file imports only the standard library, because the guardian process runs it by path, without the package.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SAME_END_SECONDS = 1.0
"""A rank that ended less than this long before the launcher counts as ended together with the launcher."""

_KILLING_SECONDS = 5.0

_ENDING_SECONDS = 10.0
"""How long the guardian process may take to end when it has nothing to do."""

_DONE = b"done\n"


class Guardian:
    """A context manager that creates a private folder and starts a guardian process.

    When the context ends, the folder is removed. If this process is killed inside the context, the guardian process
    removes the folder, and kills the processes that are left of the ranks.

    Args:
        variables: the environment variables of the guardian process. They must not contain the mark of a job.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="syncline_", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=variables,
            start_new_session=True,  # Ctrl-C and signals to the launcher's process group must not end the guardian
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def __enter__(self) -> Guardian:
        return self

    def watch(self, mark: str, sessions: Sequence[int]) -> None:
        """Send the job's running ranks to the guardian process. They replace the ranks of the previous call.

        Args:
            mark: the job's mark, a text that the environment of each rank contains.
            sessions: the process numbers of the ranks. Each rank leads a session with the same number.
        """
        self._write(" ".join([mark, *map(str, sessions)]).encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()
        self._write(_DONE)
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:  # it is suspended, and has nothing left to do
            self._process.kill()

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # the guardian process was killed: continue without it
            self._pipe.write(line)
            self._pipe.flush()


# ---------------------------------------------------------------------- in the guardian process


def main(folder: str) -> None:
    """Run the guardian process: read the messages of `Guardian` from stdin.

    If the input ends without the final message, kill the ranks' processes and remove `folder`.
    """
    mark, running, ended = "", dict[int, int](), dict[int, float]()
    with open(0, "rb", buffering=0) as pipe:  # without a buffer, so that `poll` sees each message
        while True:
            poll = select.poll()
            for descriptor in (0, *running):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            for descriptor in ready & set(running):
                ended[running.pop(descriptor)] = time.monotonic()
                os.close(descriptor)
            if 0 not in ready:
                continue
            line = pipe.readline()
            if line == _DONE:
                return
            if not line.endswith(b"\n"):
                break
            mark, *texts = line.decode().split()
            sessions = [int(text) for text in texts]
            # Ranks of an earlier attempt, and ranks without a pidfd, count as having ended long ago.
            ended.update(dict.fromkeys([*running.values(), *sessions], -math.inf))
            for descriptor in running:
                os.close(descriptor)
            running = _followed(sessions)
            for session in running.values():
                del ended[session]
    now = time.monotonic()
    certain = {session for session, when in ended.items() if now - when < _SAME_END_SECONDS}
    kill_sessions({*running.values(), *certain}, set(ended), mark)
    shutil.rmtree(folder, ignore_errors=True)


def _followed(sessions: Sequence[int]) -> dict[int, int]:
    """Open a pidfd for the leader of each session. Return the sessions by pidfd.

    A session is left out if its leader has ended or if the system cannot open a pidfd.
    """
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    for session in sessions:
        with contextlib.suppress(OSError):
            found[os.pidfd_open(session)] = session
    return found


def kill_sessions(sessions: set[int], doubtful: set[int], mark: str) -> None:
    """Kill the processes of the ranks' sessions, again and again until none is left or a time limit is reached.

    Args:
        sessions: sessions that certainly belong to ranks. All their processes are killed.
        doubtful: session numbers that the system may have reused. Only their processes with `mark` are killed.
        mark: the job's mark, a text in the environment of the job's processes.
    """
    deadline = time.monotonic() + _KILLING_SECONDS
    while time.monotonic() < deadline:
        members = [
            pid
            for pid, _, _, session in running_processes()
            if session in sessions or (session in doubtful and is_marked(pid, mark))
        ]
        if not members:
            return
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class RunningProcess(NamedTuple):
    """The process number of a running process, and the numbers of its parent, process group and session."""

    pid: int
    parent: int
    group: int
    session: int


def running_processes() -> Iterator[RunningProcess]:
    """Yield all running processes of this host. On systems without /proc, yield nothing."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            # The format is "pid (name) state ppid pgrp session ...". The name may contain spaces and brackets.
            state, *numbers = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield RunningProcess(int(folder.name), *map(int, numbers))


def is_marked(pid: int, mark: str) -> bool:
    """Return True if the environment of the process `pid` contains the text `mark`."""
    try:
        return os.fsencode(mark) in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return False


if __name__ == "__main__":
    main(sys.argv[1])
