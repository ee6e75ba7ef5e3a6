"""Detection of ranks on this host whose process has ended."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from syncline.liveness.processes import RankProcess

__all__ = ["Peers"]


class Peers:
    """The processes of the other ranks, identified so that a reused process number is not mistaken for a rank.

    A process is identified by its number and its start time, which needs no open file. If `/proc` does not show the
    start time, a process descriptor (pidfd) identifies it.

    Args:
        pids: process numbers by rank.
        rank: this rank, which is not watched.

    Raises:
        OSError: this kernel has no process descriptors, or a process has ended already.
    """

    def __init__(self, pids: Sequence[int], rank: int) -> None:
        self.pids = list(pids)
        self._processes: dict[int, RankProcess] = {}
        self._rank_of: dict[int, int] = {}
        try:
            for peer, pid in enumerate(pids):
                if peer == rank:
                    continue
                process = RankProcess.here(pid)
                if process is None:
                    self._rank_of[os.pidfd_open(pid)] = peer
                else:
                    self._processes[peer] = process
        except BaseException:
            self.close()
            raise

    def gone(self) -> list[int]:
        """Return the ranks whose process has ended. Any thread may call this."""
        gone = [peer for peer, process in self._processes.items() if process.has_ended()]
        rank_of = self._rank_of
        if rank_of:
            poll = select.poll()  # a new object per call, because two threads cannot use one at once
            for descriptor in rank_of:
                poll.register(descriptor, select.POLLIN)
            gone += [rank_of[descriptor] for descriptor, events in poll.poll(0) if events & select.POLLIN]
        return sorted(gone)

    def close(self) -> None:
        """Stop watching all processes."""
        self._processes = {}
        rank_of, self._rank_of = self._rank_of, {}
        for descriptor in rank_of:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()
