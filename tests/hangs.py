"""The end of processes that hang: with the stacks of each.

`subprocess.run(timeout=)` kills the process that it has started and nothing else. The ranks of a launcher outlive it,
and nobody learns where they wait. `run` and `communicate` end the whole tree by SIGABRT, at which Python writes the
stacks of all threads if its faulthandler is on. The error that they raise has these stacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from syncline.tools.launch.guardian import is_marked, running_processes

__all__ = [
    "FAULTHANDLER",
    "HANG_SECONDS",
    "communicate",
    "communicate_with_all",
    "end_trees",
    "handles",
    "run",
]

HANG_SECONDS = 300.0
"""After this time, a process hangs. It is no promise of any test, so it is far above what a busy machine needs."""

FAULTHANDLER = {"PYTHONFAULTHANDLER": "1"}
"""The environment variable with which Python writes its stacks at SIGABRT."""

_MARK = "SYNCLINE_TEST_TREE"
"""The environment variable by which processes are found whose parent has ended."""

_HANDING_ON_SECONDS = 5.0

_WRITING_SECONDS = 10.0

_ENDING_SECONDS = 60.0


def run(
    command: str | Sequence[str | Path],
    *,
    timeout_seconds: float = HANG_SECONDS,
    input: str | None = None,
    env: dict[str, str] | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does with captured text.

    Raises:
        TimeoutError: the process has not ended in time. The text has its output, and the stacks of all its processes.
    """
    mark = uuid.uuid4().hex
    variables = {**(os.environ if env is None else env), **FAULTHANDLER, _MARK: mark}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    if input is not None:
        how["stdin"] = subprocess.PIPE
    with subprocess.Popen(command, env=variables, text=True, **how) as process:
        out, err = communicate(process, timeout_seconds, input=input, mark=mark)
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def communicate(
    process: subprocess.Popen[str],
    timeout_seconds: float = HANG_SECONDS,
    *,
    input: str | None = None,
    mark: str = "",
) -> tuple[str, str]:
    """Do what `process.communicate` does.

    Args:
        process: the process. Its environment must have `FAULTHANDLER`, as that of pytest has.
        timeout_seconds: the time that it has.
        input: what it reads.
        mark: a text in the environment of the processes that belong to it.

    Raises:
        TimeoutError: as that of `run`.
    """
    [output] = communicate_with_all([process], timeout_seconds, input=input, mark=mark)
    return output


def communicate_with_all(
    processes: Sequence[subprocess.Popen[str]],
    timeout_seconds: float = HANG_SECONDS,
    *,
    input: str | None = None,
    mark: str = "",
) -> list[tuple[str, str]]:
    """Do what `communicate` does with ranks that wait for each other. If one of them hangs, all are ended."""
    roots = [process.pid for process in processes]
    deadline = time.monotonic() + timeout_seconds
    try:
        return [
            process.communicate(input, timeout=max(0.1, deadline - time.monotonic())) for process in processes
        ]
    except subprocess.TimeoutExpired:
        pass
    except BaseException:  # Ctrl-C
        _kill(_levels(roots, mark))
        raise
    # In a thread: stacks can be longer than what a pipe holds, so the pipes are read meanwhile.
    ending = threading.Thread(target=end_trees, args=(roots, mark))
    ending.start()
    texts = []
    for process in processes:
        texts.append(
            f"no end after {timeout_seconds:g} s: {process.args!r}. What it has written, with stacks:"
        )
        try:
            outputs: tuple[str | bytes | None, ...] = process.communicate(timeout=_ENDING_SECONDS)
        except subprocess.TimeoutExpired as error:  # a process that was not found has the pipes
            process.kill()
            outputs = (error.stdout, error.stderr)
        texts += [
            text.decode(errors="replace") if isinstance(text, bytes) else text for text in outputs if text
        ]
    ending.join()
    raise TimeoutError("\n".join(texts))


def end_trees(roots: Collection[int], mark: str = "") -> None:
    """End processes and all that they have started, by SIGABRT and then by SIGKILL.

    A launcher hands on what its ranks write, and ends them when one has ended. So the ranks, which lead sessions of
    their own, get the signal before the launcher, and all at once. Then a launcher that does not hang ends by itself.

    Without /proc, as on macOS, only the processes themselves are ended.
    """
    levels = _levels(roots, mark)
    innermost = max(levels.values(), default=0)
    for level in range(innermost, -1, -1):
        # the others, such as a shell or a guardian, need not end before the last
        writers = [pid for pid in levels if levels[pid] == level and handles(pid, signal.SIGABRT)]
        if level < innermost:
            _wait(writers, _HANDING_ON_SECONDS)
        for pid in writers:
            _send(pid, signal.SIGABRT)
        _wait(writers)
        levels |= _levels(roots, mark)  # a launcher may have started lost ranks again
    _kill(levels)


def _levels(roots: Collection[int], mark: str) -> dict[int, int]:
    """Return the processes of some trees, each with the number of sessions between it and its root."""
    running = {process.pid: process for process in running_processes()}
    members = {*roots} | {pid for pid in running if mark and is_marked(pid, mark)}
    while more := {pid for pid, process in running.items() if process.parent in members} - members:
        members |= more

    def level(pid: int) -> int:
        process, parent = running[pid], running.get(running[pid].parent)
        if pid in roots:
            return 0
        if parent is None or parent.pid not in members:  # its parent has ended
            return 1
        return level(parent.pid) + (process.session != parent.session)

    return dict.fromkeys(roots, 0) | {pid: level(pid) for pid in members & running.keys()}


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process handles a signal in its own way; without /proc, always True."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or there is no /proc
        return not Path("/proc/self").exists()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        _send(pid, signal.SIGKILL)
    _wait(pids)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(pids: Iterable[int], timeout_seconds: float = _WRITING_SECONDS) -> None:
    deadline = time.monotonic() + timeout_seconds
    while (
        not {process.pid for process in running_processes()}.isdisjoint(pids) and time.monotonic() < deadline
    ):
        time.sleep(0.02)
