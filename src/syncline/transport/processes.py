"""The processes of the ranks: has one ended, is one stopped? The kernel says, for ranks on this host.

A process is known by its number and by when it was started, so that no other one with the same number is taken for it.
Nothing is kept open.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from syncline.store_messages import decode

__all__ = ["RankProcess", "host_key"]


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
        try:
            pid = os.getpid()
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
        except OSError:
            return _is_unknown(self.pid)
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
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _is_unknown(pid: int) -> bool:
    """Whether the kernel knows no such process. (It may hide what another user's does.)"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
