"""Two-phase commit of parameter syncs: all remaining ranks write the result of a sync, or none, if a rank is lost.

[Note: a sync as a transaction]

A collective may complete on one rank and fail on another, because a third rank is lost. Without a second phase, the
first rank would write the mean and continue, and the second one would not. In `sl.steps` all ranks therefore confirm
that they have received the result of a sync, and only then write it. The confirmation, too, may complete on one rank
and fail on another. But then both ranks have the result. When the ranks agree on a membership, a rank whose
confirmation failed learns whether another rank has written the result. If so, it writes the result, too. If not, all
ranks discard the result, and sync again without the lost rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.transport.base import Transport


class Standing:
    """The two-phase commit of one module's parameter syncs, and counts of the syncs that were written.

    Args:
        transport: the transport between the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self.confirms = False
        """Whether all ranks confirm a sync before a rank writes it."""
        self.num_written = 0
        """The number of syncs that were written."""
        self.contained = 0
        """The last step of which the parameters of this rank contain the changes by all ranks."""
        self.someone_waits = False
        """Whether a process wants to join the ranks, as rank 0 reported in the last confirmation."""
        self._transport = transport
        self._asks: Callable[[], bool] = lambda: False
        self._prepared: Callable[[], object] | None = None
        self._contained_then = 0

    def begin(self, asks: Callable[[], bool] | None) -> None:
        """Confirm each sync from now on.

        Args:
            asks: a function that returns whether a process wants to join. Only the answer of rank 0 counts. None ends
                the confirmations.
        """
        self.confirms, self._asks = asks is not None, asks or (lambda: False)

    def announce(self, contained: int) -> None:
        """Announce the step up to which the parameters contain the changes of all ranks after the next sync."""
        self._contained_then = contained

    def write(self, write: Callable[[], object]) -> None:
        """Write the result of a sync that this rank has received. A collective call if ranks confirm."""
        self._prepared = write
        if self.confirms and self._transport.size > 1:
            flag = torch.zeros(1, dtype=torch.int32, device=self._transport.control_device)
            if self._transport.rank == 0 and self._asks():
                flag.fill_(1)
            self._transport.all_reduce(flag, "max").wait()
            self.someone_waits = bool(flag.item())
        self._write_prepared()

    def conclude(self, *, is_written: bool) -> None:
        """Write or discard the result whose confirmation failed.

        Args:
            is_written: whether another rank has written it.
        """
        if is_written and self._prepared is not None:
            self._write_prepared()
        self._prepared = None

    def follow(self, transport: Transport) -> None:
        """Confirm over this transport from now on."""
        self._transport, self.someone_waits = transport, False

    def continue_at(self, num_written: int, contained: int) -> None:
        """Continue with the counts of another rank."""
        self.num_written, self.contained = num_written, contained

    def contain(self, step: int) -> None:
        """Record that the parameters contain the changes of all ranks up to a step."""
        self.contained = max(self.contained, step)

    def _write_prepared(self) -> None:
        write, self._prepared = self._prepared, None
        assert write is not None
        write()
        self.contain(self._contained_then)
        self.num_written += 1
