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
        try:
            for peer, pid in enumerate(pids):
                if peer != rank:
                    self._rank_of[os.pidfd_open(pid)] = peer
        except BaseException:
            self.close()
            raise

    def gone(self) -> list[int]:
        """Ranks whose process has ended; any thread may ask."""
        rank_of = self._rank_of
        poll = select.poll()  # one of its own, for it refuses to be used by two threads at once
        for descriptor in rank_of:
            poll.register(descriptor, select.POLLIN)
        return sorted(rank_of[descriptor] for descriptor, events in poll.poll(0) if events & select.POLLIN)

    def close(self) -> None:
        """Follow nobody any more."""
        rank_of, self._rank_of = self._rank_of, {}
        for descriptor in rank_of:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()
