"""Search for the rank that failed first, and the text about it. The functions are pure, except for reading files."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.session.stop_request import EXIT_STOPPED

_MAX_TAIL_LINES = 20

_MAX_OTHERS = 4

_WORKER_FRAME = str(Path(__file__).with_name("worker.py"))

# Words in errors that a rank raises because another rank has ended.
_OF_A_LOST_PEER = re.compile(
    r"PeerLost|PeerFailed|CollectiveTimeout|connection|broken pipe|\bpeer\b|remote process|timed? ?out|"
    r"failed to recv|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)

_START = re.compile(r"Traceback \(most|Fatal Python error")
"""Start of an error text that says why a process has ended."""


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The content of a rank's error file."""

    summary: str
    """Type and text of the exception."""
    traceback: str
    """Traceback as Python prints it; empty for `sys.exit`."""
    time_ns: int
    """When the file was written, in nanoseconds since 1970."""
    exit_code: int | None = None
    """Exit code to which the exception leads; None if torch's own @record wrote the file."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a rank with an exit code other than 0."""

    rank: int
    pid: int
    return_code: int
    """Return code as in Python's subprocess module; a negative number means a signal."""
    words: LastWords | None
    stderr_tail: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell, from 1 to 255; 128 + number for a signal."""
        if self.words is not None and self.words.exit_code:
            return self.words.exit_code  # a signal may have ended the process during its cleanup
        code = 128 - self.return_code if self.return_code < 0 else self.return_code
        return code & 0xFF or 1

    @property
    def has_stopped(self) -> bool:
        """Whether the rank ended because all ranks had agreed to stop."""
        return self.exit_code == EXIT_STOPPED

    @property
    def ending(self) -> str:
        """The end of the rank in words, to follow the rank's name."""
        if self.words is None and self.return_code < 0:
            return f"was killed by {_signal_name(-self.return_code)}, exit code {self.exit_code}"
        if self.words is not None and not self.words.traceback:
            return f"called sys.exit, exit code {self.exit_code}"
        return f"failed with exit code {self.exit_code}"


def read_last_words(path: str) -> LastWords | None:
    """Return the content of an error file, written by Syncline or by torch's @record; None if there is none."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            message = {"message": message}
        extra = message.get("extraInfo", {})
        return LastWords(
            summary=str(message["message"]),
            traceback=str(extra.get("py_callstack", "")),
            time_ns=int(extra.get("time_ns") or Path(path).stat().st_mtime_ns),
            exit_code=extra.get("exit_code"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others, as far as this can be determined.

    - The time of an exception is known from the error file. The time of a killed rank is not, and its peers may record
      lost connections before the launcher detects the death. A death without an exception therefore ranks before an
      error about a lost connection, but after an exception with a cause of its own.
    - A rank may close its connections before its exception is recorded (`finally: destroy_process_group()`). Its
      record is then later than those of its peers.
    - The launcher ends the remaining ranks by SIGTERM.
    - A rank that stopped as requested has not failed, whenever it stopped.

    Args:
        failures: at least one failure, in the order in which the launcher detected them.
    """
    failures = [failure for failure in _by_themselves(failures) if not failure.has_stopped] or failures
    spoke = sorted((f for f in failures if f.words is not None), key=_time_ns)
    silent = [f for f in _by_themselves(failures) if f.words is None]
    if spoke and not _blames_a_peer(spoke[0]):
        return spoke[0]
    own_reasons = [f for f in spoke if f.words is not None and f.words.traceback and not _blames_a_peer(f)]
    return (silent or own_reasons or spoke or failures)[0]


def _by_themselves(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures without those that the launcher caused. It did not cause the first one that it detected."""
    return [
        failure
        for index, failure in enumerate(failures)
        if index == 0 or failure.words is not None or failure.return_code != -signal.SIGTERM
    ]


def _time_ns(failure: Failure) -> int:
    return failure.words.time_ns if failure.words is not None else 0


def _blames_a_peer(failure: Failure) -> bool:
    words = failure.words
    if words is None:
        return False
    # Search the whole chain of exceptions, but not the source lines, which may contain words such as "timeout=60".
    chain = re.findall(r"^[\w.]+: .*$", words.traceback, re.MULTILINE)
    return any(_OF_A_LOST_PEER.search(text) for text in (words.summary, *chain))


def describe(failures: Sequence[Failure], *, host: str, more_hosts: bool = False) -> str:
    """Return the final message to the user: a summary line, then the traceback of the rank that failed first.

    Args:
        failures: at least one failure, in the order in which the launcher detected them.
        host: this host's name.
        more_hosts: whether ranks also run on other hosts, whose failures are not known here.
    """
    first = first_failure(failures)
    line = f"rank {first.rank} (pid {first.pid} on {host}) {first.ending}"
    others = [failure for failure in _by_themselves(failures) if failure is not first]
    stopped = [other for other in others if other.has_stopped and not first.has_stopped]
    others = [other for other in others if other not in stopped]
    if others:
        line += f"; after it {_named(others)}"
    if stopped:
        line += f"; not failed but stopped, as asked: {_named(stopped)}"
    if more_hosts:
        line += "; it is the first on this host, see the others' output as well"
    details = _details(first)
    if first.words is None and first.return_code < 0:  # its peers' errors say which operation it was in
        details += _seen_by_another(others)
    return "\n".join([f"{line}:", *details]) if details else line


def _seen_by_another(others: Sequence[Failure]) -> list[str]:
    """Return the first error that another rank raised because this one has ended. It says where both ranks were."""
    for other in others:
        if other.words is not None and _blames_a_peer(other):
            return [f"as rank {other.rank} saw it:", *other.words.summary.rstrip().split("\n")]
    return []


def _named(failures: Sequence[Failure]) -> str:
    named = [f"rank {failure.rank} {_briefly(failure)}" for failure in failures[:_MAX_OTHERS]]
    hidden = len(failures) - len(named)
    return ", ".join(named) + (f" and {hidden} more" if hidden else "")


def _briefly(failure: Failure) -> str:
    if failure.words is None and failure.return_code < 0:
        return f"({_signal_name(-failure.return_code)})"
    return f"(exit code {failure.exit_code})"


def _details(failure: Failure) -> list[str]:
    """Return the lines that explain the failure: the traceback, else the end of the rank's stderr."""
    if failure.words is not None and failure.words.traceback:
        return failure.words.traceback.rstrip().split("\n")
    lines = _end_of(failure.stderr_tail)
    is_killed = failure.words is None and failure.return_code == -signal.SIGKILL
    if is_killed and not any(_START.search(line) for line in lines):
        lines = []  # earlier output does not explain a SIGKILL
    if failure.words is not None and not any(line and line in failure.words.summary for line in lines):
        lines.insert(0, failure.words.summary)
    if not lines and is_killed:
        lines.append("(it printed no error; the kernel does this when memory runs out, see `dmesg`)")
    return lines


def _end_of(tail: Sequence[str]) -> list[str]:
    """Return the last traceback in `tail` and the lines after it; without a traceback, the last lines."""
    lines = [line for line in tail if _WORKER_FRAME not in line]
    starts = [i for i, line in enumerate(lines) if _START.search(line)]
    if not starts:
        return lines[-_MAX_TAIL_LINES:]
    start = starts.pop()
    chained = re.compile(r"The above exception was the direct cause|During handling of the above")
    while starts and any(chained.search(line) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
