"""A process that cleans up after a killed launcher. It kills the ranks' child processes and removes the folder.

[Note: why another process]

SIGKILL ends the launcher before it can clean up. The kernel then kills the ranks (see `process.end_with_parent`), but
not their child processes, such as workers of a DataLoader. It does not remove the launcher's folder either. Therefore a
small process in a session of its own, the guardian, waits at a pipe that only the launcher holds open. If the pipe
closes without a final message, the launcher was killed, and the guardian kills the sessions of its ranks. A process
that has left its rank's session (setsid) was detached on purpose, and the guardian leaves it running.

After a rank has ended, the system may give its process number to another process. For ranks that ended before the
launcher, the guardian therefore kills only processes with the job's mark in their environment.

This file needs only the standard library, because the guardian runs it by path.
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
from types import TracebackType

_READ_BYTES = 1 << 16

_SAME_END_SECONDS = 1.0
"""Ranks that ended at most this long before the launcher count as ended together with it."""

_KILLING_SECONDS = 5.0

_DONE = b"done"


class Guardian:
    """A context manager with a private folder and a guardian process. On exit it removes the folder.

    If this process is killed before the exit, the guardian process cleans up.

    Args:
        variables: the environment of the guardian process, without the mark of any job.
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
            start_new_session=True,  # Ctrl-C and signals to the launcher's process group must not reach it
        )

    def __enter__(self) -> Guardian:
        return self

    def watch(self, mark: str, sessions: Sequence[int]) -> None:
        """Set the job's ranks, given as session leaders. Their environment contains `mark`."""
        self._write(" ".join([mark, *map(str, sessions)]).encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._temporary.cleanup()
        self._write(_DONE)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the guardian process was killed; continue without it
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()


# ---------------------------------------------------------------------- in the guardian


def main(folder: str) -> None:
    """Read the messages of `Guardian` from stdin. Clean up if the input ends without the final message."""
    mark, running, ended = "", dict[int, int](), dict[int, float]()
    rest = b""
    while True:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        for descriptor in set(ready) & set(running):
            ended[running.pop(descriptor)] = time.monotonic()
            os.close(descriptor)
        if 0 not in ready:
            continue
        data = os.read(0, _READ_BYTES)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == _DONE:
                return
            mark, *sessions = line.decode().split()
            ended.update(dict.fromkeys(running.values(), -math.inf))  # ranks of an earlier attempt
            for descriptor in running:
                os.close(descriptor)
            running = _followed([int(session) for session in sessions])
            ended.update(dict.fromkeys(map(int, sessions), -math.inf))  # if they cannot be followed
            for session in running.values():
                del ended[session]
    now = time.monotonic()
    certain = {session for session, when in ended.items() if now - when < _SAME_END_SECONDS}
    _kill({*running.values(), *certain}, set(ended), mark)
    shutil.rmtree(folder, ignore_errors=True)


def _followed(sessions: Sequence[int]) -> dict[int, int]:
    """Return sessions by the pidfds of their leaders, without leaders that have ended or cannot be followed."""
    found = {}
    for session in sessions:
        with contextlib.suppress(OSError):
            found[os.pidfd_open(session)] = session
    return found


def _kill(sessions: set[int], doubtful: set[int], mark: str) -> None:
    """Kill all processes in `sessions`, and those with `mark` in `doubtful` sessions, until none is left."""
    deadline = time.monotonic() + _KILLING_SECONDS
    while time.monotonic() < deadline:
        members = [
            pid
            for pid, session in _processes()
            if session in sessions or (session in doubtful and _is_marked(pid, mark))
        ]
        if not members:
            return
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> Iterator[tuple[int, int]]:
    """Yield (pid, session) of each running process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", errors="replace") as file:
                    # The format is "pid (name) state ppid pgrp session ...". The name may contain spaces and brackets.
                    state, _, _, session = file.read().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    yield int(name), int(session)


def _is_marked(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fsencode(mark) in file.read()
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
