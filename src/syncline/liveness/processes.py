"""The processes of ranks on this host: detection of processes that have ended, are stopped, or are forks of a rank.

The kernel reports whether a process has ended or is stopped. A process is identified by its pid and its start time, so
that a later process with the same pid is not mistaken for it. No file stays open.

A fork of a rank inherits the rank's connections and memory, but must not use them. So certain objects refuse all calls
in a fork. This module keeps the list of these objects, and its hook, which Python calls in each fork, informs them.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import sys
import weakref
from dataclasses import dataclass
from typing import Protocol

from syncline._torch.process_groups import living_groups
from syncline.errors import SynclineError
from syncline.liveness.calls import Failure
from syncline.liveness.store import decode

_STAT_BYTES = 4096

_EXITING = 0x4
"""The flag of the kernel (PF_EXITING) of a thread that has begun to end. It never runs code of its program again.

The kernel then frees the memory of the process, and reports the process as ended only after that. This takes 25 ms for
a process with torch.
"""


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, identified by host, pid and start time.

    Examples:
        >>> own = RankProcess.own()
        >>> own is None or (own.has_ended(), own.is_stopped())
        (False, False)
    """

    host: str
    """A key of the host. Processes with the same key can see each other's states. `host_key` returns the key."""
    pid: int
    started: int
    """The start time of the process, in the units of /proc/PID/stat, of the clock of the host.

    In a time namespace (see `man time_namespaces`), /proc shows another start time. So its offset is subtracted.
    """

    @staticmethod
    def own() -> RankProcess | None:
        """Return the `RankProcess` of this process. Return None if the system does not show the states of processes."""
        return RankProcess.here(os.getpid())

    @staticmethod
    def here(pid: int) -> RankProcess | None:
        """Return the `RankProcess` of the process with this pid; None if it has ended, or if it cannot be seen."""
        try:
            if os.readlink("/proc/self") != str(os.getpid()):
                return None  # /proc shows the process numbers of another container
            return RankProcess(host_key(), pid, _state_and_start(pid)[1])
        except (OSError, IndexError, ValueError):
            return None

    def to_json(self) -> str:
        """Return the process as JSON."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> RankProcess:
        """Return the process that `to_json` has converted to `text`."""
        return decode(RankProcess, text, "the process of a rank")

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended, or is ending. If the state is unknown, return False."""
        try:
            state, started = _state_and_start(self.pid)
        except OSError as error:
            has_no_file_left = error.errno in (errno.EMFILE, errno.ENFILE)
            return _is_unknown(self.pid) or (has_no_file_left and _is_empty(self.pid))
        except (IndexError, ValueError):
            return False
        return state in "ZXx" or not self._is_from(started)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP, Ctrl-Z or a debugger."""
        try:
            state, started = _state_and_start(self.pid)
        except (OSError, IndexError, ValueError):
            return False
        return state in "Tt" and self._is_from(started)

    def _is_from(self, started: int) -> bool:
        """Return whether a process with this pid and start time is this one. The offset of a clock may be rounded."""
        return abs(started - self.started) <= 1


@functools.cache  # it does not change while the process lives, and several parts of `sl.init` need it
def host_key() -> str:
    """Return a key of this host. Processes with different keys cannot share memory.

    Processes with equal keys may still be unable to share memory. Only an attempt to map memory proves that they can.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    return " ".join([boot, *spaces])


@functools.cache  # each place of a rank that is published contains it
def clock_key() -> str:
    """Return a key of the monotonic clock of this process. Processes with the same key read the same clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process, which is "X" from the moment at which its end has begun, and its start time."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # less than half the cost of `open`
    try:
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    state = "X" if int(fields[6]) & _EXITING else fields[0].decode()
    return state, int(fields[19]) - _start_offset()


@functools.cache
def _start_offset() -> int:
    """Return how much larger the start times in /proc are for this process than for the host.

    They are larger by the offset of the boot clock of its time namespace. Without such a namespace, return 0.
    """
    if sys.platform != "linux":
        return 0
    try:
        namespace = os.readlink("/proc/self/ns/time")
        if namespace != os.readlink("/proc/self/ns/time_for_children"):
            return 0  # the file below has the offsets for children. A process that has begun there sees them
        with open("/proc/self/timens_offsets") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    seconds = sum(int(row[1]) + int(row[2]) / 1e9 for row in rows if row[0] == "boottime")
    return round(seconds * os.sysconf("SC_CLK_TCK"))


def _is_unknown(pid: int) -> bool:
    """Return whether the kernel knows no process with this pid.

    This function does not use /proc, because /proc may hide the processes of other users.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _is_empty(pid: int) -> bool:
    """Return whether a process has no working directory, because it has ended. Open no file descriptor for this."""
    try:
        os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


# ---------------------------------------------------------------------- forks


FORKED = Failure(
    SynclineError,
    "this process was forked from a rank and is not a rank itself, so it must not synchronize: the other ranks would "
    "mistake its messages and its writes to shared memory for those of the rank. Synchronize only in the rank. Start "
    "helper processes before sl.init(), or by spawn instead of fork",
)


class _Refusing(Protocol):
    def refuse_a_fork(self) -> None:
        """Make every later call raise an error. When this method runs, the fork has no other thread."""


_live: weakref.WeakSet[_Refusing] = weakref.WeakSet()

_inherited: set[object] = set()


def refuse_in_forks(what: _Refusing) -> None:
    """Make `what` refuse every call in each process that is forked from this process from now on."""
    _live.add(what)


def is_inherited(group: object) -> bool:
    """Return whether this process is a fork that has inherited the process group from its parent."""
    return group in _inherited


def _in_the_fork() -> None:
    for namespace in (host_key, clock_key, _start_offset):
        namespace.cache_clear()  # the fork may be in another namespace
    _inherited.update(living_groups())
    for what in list(_live):
        what.refuse_a_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_fork)
