"""Are the processes of the other ranks still there?"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

__all__ = ["Peers"]


class Peers:
    """Follows processes by descriptors of them, so that no number is ever taken for another process.

    Args:
        pids: by rank.
        rank: this rank, which is not looked at.

    Raises:
        OSError: this kernel has no such descriptors, or a process is gone already.
    """

    def __init__(self, pids: Sequence[int], rank: int) -> None:
        self.pids = list(pids)
        self._rank_of: dict[int, int] = {}
        self._poll = select.poll()
        try:
            for peer, pid in enumerate(pids):
                if peer != rank:
                    descriptor = os.pidfd_open(pid)
                    self._rank_of[descriptor] = peer
                    self._poll.register(descriptor, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return sorted(self._rank_of[descriptor] for descriptor, _ in self._poll.poll(0))

    def stopped(self) -> list[int]:
        """Ranks whose process is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return sorted(rank for rank in self._rank_of.values() if _is_stopped(self.pids[rank]))

    def close(self) -> None:
        """Follow nobody any more."""
        self._poll = select.poll()
        for descriptor in self._rank_of:
            os.close(descriptor)
        self._rank_of = {}

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
