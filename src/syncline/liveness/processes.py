"""The processes of the ranks: has one ended, is one stopped? The kernel says, for ranks on this host.

A process is known by its number and by when it was started, so that no other one with the same number is taken for it.
Nothing is kept open.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass

from syncline.liveness.store_messages import decode

__all__ = ["RankProcess", "host_key"]


_STAT_BYTES = 4096


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank.

    Example:
        >>> own = RankProcess.own()
        >>> own is None or (own.has_ended(), own.is_stopped())
        (False, False)
    """

    host: str
    """What processes that see each other have in common."""
    pid: int
    started: int
    """When, in the kernel's units."""

    @staticmethod
    def own() -> RankProcess | None:
        """This process; None where the system does not say."""
        return RankProcess.here(os.getpid())

    @staticmethod
    def here(pid: int) -> RankProcess | None:
        """A process on this host; None where the system does not say, as where it has ended."""
        try:
            if os.readlink("/proc/self") != str(os.getpid()):
                return None  # /proc numbers processes as another container does
            return RankProcess(host_key(), pid, _state_and_start(pid)[1])
        except (OSError, IndexError, ValueError):
            return None

    def to_json(self) -> str:
        """As text."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> RankProcess:
        """What `to_json` made."""
        return decode(RankProcess, text, "the process of a rank")

    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        try:
            state, started = _state_and_start(self.pid)
        except OSError as error:
            has_no_file_left = error.errno in (errno.EMFILE, errno.ENFILE)
            return _is_unknown(self.pid) or (has_no_file_left and _is_empty(self.pid))
        except (IndexError, ValueError):
            return False
        return state in "ZXx" or started != self.started

    def is_stopped(self) -> bool:
        """Whether it is stopped: by SIGSTOP, Ctrl-Z or a debugger."""
        try:
            state, started = _state_and_start(self.pid)
        except (OSError, IndexError, ValueError):
            return False
        return state in "Tt" and started == self.started


def host_key() -> str:
    """What has to be equal where processes can share memory in our way; that they do is proved later."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    return " ".join([boot, *spaces])


def _state_and_start(pid: int) -> tuple[str, int]:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # less than half of the work of `open`
    try:
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return fields[0].decode(), int(fields[19])


def _is_unknown(pid: int) -> bool:
    """Whether the kernel knows no such process. (It may hide what another user's does.)"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _is_empty(pid: int) -> bool:
    """Whether a process has no folder that it works in: it has ended. To read that takes no descriptor."""
    try:
        os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
