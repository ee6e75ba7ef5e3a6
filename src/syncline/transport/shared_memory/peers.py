"""Are the processes of the other ranks still there?"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from syncline.liveness.processes import RankProcess

__all__ = ["Peers"]


class Peers:
    """Follows processes so that no number is ever taken for another process.

    They are known by when they were started, which keeps nothing open. Where `/proc` does not say that, each is
    followed by a descriptor.

    Args:
        pids: by rank.
        rank: this rank, which is not looked at.

    Raises:
        OSError: this kernel has no such descriptors, or a process is gone already.
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
        """Ranks whose process has ended; any thread may ask."""
        gone = [peer for peer, process in self._processes.items() if process.has_ended()]
        rank_of = self._rank_of
        if rank_of:
            poll = select.poll()  # one of its own, for it refuses to be used by two threads at once
            for descriptor in rank_of:
                poll.register(descriptor, select.POLLIN)
            gone += [rank_of[descriptor] for descriptor, events in poll.poll(0) if events & select.POLLIN]
        return sorted(gone)

    def close(self) -> None:
        """Follow nobody any more."""
        self._processes = {}
        rank_of, self._rank_of = self._rank_of, {}
        for descriptor in rank_of:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()
