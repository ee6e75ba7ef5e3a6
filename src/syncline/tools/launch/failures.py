"""Functions that find the rank that failed first, and describe its failure for the user.

All functions are pure, except `read_error_file`.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.session.stop_request import EXIT_STOPPED
from syncline.tracebacks import without_numbers
from syncline.words import describe_ranks

_MAX_TAIL_LINES = 20

_MAX_OTHERS = 4

_WORKER_FRAME = str(Path(__file__).with_name("worker.py"))

_LOST_PEER = re.compile(
    r"PeerLost|PeerFailed|CollectiveTimeout|connection|broken pipe|\bpeer\b|remote process|timed? ?out|"
    r"failed to recv|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""A pattern of the words that occur in errors of a rank whose peer has ended."""

_START = re.compile(r"Traceback \(most|Fatal Python error")
"""A pattern of the first line of an error that Python prints when a process fails."""


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """The content of a rank's error file, which describes the exception that ended the rank."""

    summary: str
    """The type and the text of the exception."""
    traceback: str
    """The brief traceback, as the rank prints it. It is empty if the rank ended by `sys.exit`."""
    whole: str = ""
    """The whole traceback. It is empty if the rank ended by `sys.exit`, or if torch's own @record wrote the file."""
    time_ns: int
    """The time of the exception, in nanoseconds since 1970."""
    monotonic_ns: int = 0
    """The same time by the monotonic clock, which is never set. It is 0 if Syncline has not written the file."""
    exit_code: int | None = None
    """The exit code that follows from the exception. It is None if torch's own @record wrote the file."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A description of how a rank ended, for a rank whose exit code was not 0."""

    rank: int
    pid: int
    return_code: int
    """The return code as in Python's subprocess module. -N means that the signal with the number N ended the rank."""
    record: ErrorRecord | None
    """The rank's own record of its exception. It is None if the rank has recorded no exception."""
    stderr_tail: Sequence[str] = ()
    """The last lines that the rank wrote to stderr."""
    is_shown: bool = False
    """Whether the user has seen the error of this rank, or an equal one of another rank."""

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell, from 1 to 255. If a signal ended the rank, it is 128 + the signal's number."""
        if self.record is not None and self.record.exit_code:
            return self.record.exit_code  # a signal may have ended the process during its cleanup
        code = 128 - self.return_code if self.return_code < 0 else self.return_code
        return code & 0xFF or 1

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended the rank, and no exception."""
        return self.record is None and self.return_code < 0

    @property
    def has_stopped(self) -> bool:
        """Whether the rank ended because all ranks had agreed to stop."""
        return self.exit_code == EXIT_STOPPED

    @property
    def ending(self) -> str:
        """A text that says how the rank ended, such as "failed with exit code 1"."""
        if self.is_killed:
            return f"was killed by {_signal_name(-self.return_code)}, exit code {self.exit_code}"
        if self.record is not None and not self.record.traceback:
            return f"called sys.exit, exit code {self.exit_code}"
        return f"failed with exit code {self.exit_code}"


def read_error_file(path: str) -> ErrorRecord | None:
    """Read an error file that Syncline or torch's @record has written. Return None if there is no valid file."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            message = {"message": message}
        extra = message.get("extraInfo", {})
        return ErrorRecord(
            summary=str(message["message"]),
            traceback=str(extra.get("py_callstack", "")),
            whole=str(extra.get("whole_traceback", "")),
            time_ns=int(extra.get("time_ns") or Path(path).stat().st_mtime_ns),
            monotonic_ns=int(extra.get("monotonic_ns") or 0),
            exit_code=extra.get("exit_code"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that probably caused the others.

    - The time of an exception is known from the error file. The time at which a rank was killed is unknown, and its
      peers may record lost connections before the launcher detects the death. A death without an exception therefore
      counts as earlier than an error about a lost connection, but as later than an exception with another cause.
    - A rank may close its connections before its exception is recorded (`finally: destroy_process_group()`). Its peers
      then record lost connections earlier. An exception with another cause therefore counts as earlier than such
      errors.
    - The launcher ends the remaining ranks by SIGTERM. Ranks that SIGTERM ended after the first failure do not count.
    - A rank that stopped as requested has not failed, even if it ended first.

    Args:
        failures: at least one failure, in the order in which the launcher detected them.
    """
    failures = [failure for failure in _without_ended(failures) if not failure.has_stopped] or failures
    with_record = _with_record(failures)
    without_record = [f for f in _without_ended(failures) if f.record is None]
    if with_record and not _has_lost_a_peer(with_record[0]):
        return with_record[0]
    other_causes = [f for f in with_record if f.record and f.record.traceback and not _has_lost_a_peer(f)]
    return (without_record or other_causes or with_record or failures)[0]


def _without_ended(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures except those of ranks that the launcher ended by SIGTERM after the first failure."""
    return [
        failure
        for index, failure in enumerate(failures)
        if index == 0 or failure.record is not None or failure.return_code != -signal.SIGTERM
    ]


def _with_record(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures with a record, in the order of time.

    The time is that of the clock that is never set, if all ranks have recorded it, else that of the system.
    """
    found = [(failure.record, failure) for failure in failures if failure.record is not None]
    has_monotonic = all(record.monotonic_ns for record, _ in found)
    found.sort(key=lambda one: one[0].monotonic_ns if has_monotonic else one[0].time_ns)
    return [failure for _, failure in found]


def _has_lost_a_peer(failure: Failure) -> bool:
    """Return True if, according to the error of the rank, it failed because another rank had ended."""
    record = failure.record
    if record is None:
        return False
    # Search the whole chain of exceptions, but not the source lines, which may contain words such as "timeout=60".
    chain = re.findall(r"^[\w.]+: .*$", record.whole or record.traceback, re.MULTILINE)
    return any(_LOST_PEER.search(text) for text in (record.summary, *chain))


def describe(failures: Sequence[Failure], *, host: str, more_hosts: bool = False) -> str:
    """Return the final message to the user: a summary line, then the error of the rank that failed first.

    The error is left out if the user has seen it.

    Args:
        failures: at least one failure, in the order in which the launcher detected them.
        host: the name of this host.
        more_hosts: whether the job also has ranks on other hosts. Their failures are not known on this host.
    """
    first = first_failure(failures)
    counting = _without_ended(failures)
    equal = [failure for failure in counting if _is_equal(failure, first)]
    line = f"rank {first.rank} (pid {first.pid} on {host}) {first.ending}"
    if len(equal) > 1:
        line = f"{describe_ranks([one.rank for one in equal])} (on {host}) {first.ending}, by the same error"
    others = [failure for failure in counting if failure not in equal]
    stopped = [other for other in others if other.has_stopped and not first.has_stopped]
    others = [other for other in others if other not in stopped]
    if others:
        line += f"; failed later: {_named(others)}"
    if stopped:
        line += f"; stopped as requested, without a failure: {_named(stopped)}"
    if more_hosts:
        line += "; this is the first failure on this host: read the output of the other hosts, too"
    details = _details(first)
    if first.is_killed:  # the errors of other ranks name the operation
        details += _error_of_a_peer(others)
    has_more = any(
        failure.record and failure.record.whole not in ("", failure.record.traceback) for failure in failures
    )
    if has_more:
        line += " (--verbose shows whole tracebacks)"
    return "\n".join([f"{line}:", *details]) if details else line


def _is_equal(failure: Failure, first: Failure) -> bool:
    """Return whether a rank has failed as the first one has: by an equal error, apart from numbers in it."""
    if failure is first:
        return True
    if failure.record is None or first.record is None or failure.exit_code != first.exit_code:
        return False
    texts = [one.traceback or one.summary for one in (failure.record, first.record)]
    return without_numbers(texts[0]) == without_numbers(texts[1])


def _error_of_a_peer(others: Sequence[Failure]) -> list[str]:
    """Return the lines of the first error in which a rank reports a lost peer. This error names the operation."""
    for other in others:
        if other.record is not None and _has_lost_a_peer(other) and not other.is_shown:
            return [f"rank {other.rank} then reported:", *other.record.summary.rstrip().split("\n")]
    return []


def _named(failures: Sequence[Failure]) -> str:
    by_ending: dict[str, list[int]] = {}
    for failure in failures:
        how = _signal_name(-failure.return_code) if failure.is_killed else f"exit code {failure.exit_code}"
        by_ending.setdefault(how, []).append(failure.rank)
    named = [f"{describe_ranks(ranks)} ({how})" for how, ranks in by_ending.items()]
    hidden = len(named) - _MAX_OTHERS
    return ", ".join(named[:_MAX_OTHERS]) + (f" and {hidden} more kinds" if hidden > 0 else "")


def _details(failure: Failure) -> list[str]:
    """Return the lines that explain a failure: the recorded traceback, or if it is missing, the end of stderr.

    What the user has seen is left out.
    """
    if failure.record is not None and failure.record.traceback:
        return [] if failure.is_shown else failure.record.traceback.rstrip().split("\n")
    lines = _end_of(failure.stderr_tail)
    is_killed = failure.is_killed and failure.return_code == -signal.SIGKILL
    if is_killed and not any(_START.search(line) for line in lines):
        lines = []  # earlier output does not explain a SIGKILL
    if failure.record is not None and not any(line and line in failure.record.summary for line in lines):
        lines.insert(0, failure.record.summary)
    if not lines and is_killed:
        lines.append(
            "(the process printed no error. The kernel kills processes when memory runs out: check `dmesg` for this)"
        )
        return lines
    return [] if failure.is_shown else lines


def _end_of(tail: Sequence[str]) -> list[str]:
    """Return the last traceback in `tail` and all lines after it. If there is no traceback, return the last lines."""
    lines = [line for line in tail if _WORKER_FRAME not in line]
    starts = [i for i, line in enumerate(lines) if _START.search(line)]
    if not starts:
        return lines[-_MAX_TAIL_LINES:]
    start = starts.pop()
    chained = re.compile(r"The above exception was the direct cause|During handling of the above")
    while starts and any(chained.search(line) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]


def is_in(failure: Failure, printed: Iterable[str]) -> bool:
    """Return whether lines that were printed contain the error of a rank, apart from the numbers in it.

    If a rank has recorded no exception, there is no error to print, so the result is True.

    Args:
        failure: the failure of the rank.
        printed: the last lines that all ranks of the host have printed.
    """
    if failure.record is None:
        return True
    text = (failure.record.traceback or failure.record.summary.partition(": ")[2]).rstrip()
    last = without_numbers(text.rpartition("\n")[2])
    return any(without_numbers(line).endswith(last) for line in printed)


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
