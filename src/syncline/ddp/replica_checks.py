"""Comparisons of a replica with those of the other ranks: in averaging backwards, and after parameter syncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncline.gradients.riders.replica_watch import ReplicaCheck, ReplicaWatch
from syncline.transport.base import Transport

__all__ = ["ReplicaChecks"]


class ReplicaChecks:
    """The comparisons of one replica with those of the other ranks.

    Args:
        check: how to compare. None compares nothing.
    """

    def __init__(self, check: ReplicaCheck | None) -> None:
        self.in_backwards: ReplicaWatch | None = None
        """Compares the replicas of the ranks that average gradients."""
        self.after_meetings: ReplicaWatch | None = None
        """Compares the replicas of all ranks, under a strategy whose parameter syncs make parameters equal."""
        self._check = check
        self._compared_at = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaChecks, (self._check,)  # because connections cannot be pickled

    def are_needed(self, transport: Transport) -> bool:
        """Return whether a comparison is configured and there are other ranks to compare with."""
        return self._check is not None and transport.size > 1

    def watch(
        self,
        title: str,
        parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        *,
        ranks: Sequence[int],
        buffers: Sequence[tuple[str, Mapping[str, Tensor | None], str]],
        optimizers: Callable[[], Sequence[Optimizer]],
        are_equal: bool,
    ) -> ReplicaWatch | None:
        """Return a `ReplicaWatch` for the ranks of `transport`, or None if no comparison is needed.

        Args:
            title: the title of the module.
            parameters: the parameters that must be equal.
            transport: connects the ranks.
            ranks: the numbers of these ranks.
            buffers: the buffers that take part.
            optimizers: returns the optimizers whose state must be equal at the time of the call.
            are_equal: whether all replicas are known to be equal now.
        """
        if self._check is None or not self.are_needed(transport):
            return None
        return ReplicaWatch(
            self._check,
            title,
            parameters,
            transport,
            buffers=buffers,
            optimizers=optimizers,
            ranks=ranks,
            agreed_at=0 if are_equal else None,
        )

    def compare_after_meeting(self, transport: Transport, step: int) -> None:
        """Verify that parameters are equal after a sync that made them equal. A collective call.

        Raises:
            ReplicaDivergence: they differ, and the check is configured to raise. Every rank raises it.
        """
        watch = self.after_meetings
        if watch is None:
            return
        watch.begin(range(min(self._compared_at, step - 1) + 1, step + 1))
        self._compared_at = step
        told = transport.all_gather_bytes(watch.fingerprint().to_bytes(8, "little"))
        watch.compare([int.from_bytes(row, "little") for row in told], step)

    @property
    def last_compared(self) -> tuple[int, bool] | None:
        """The step of the last comparison, and whether all replicas were equal; None before the first."""
        watches = (self.in_backwards, self.after_meetings)
        compared = [watch.last_compared for watch in watches if watch is not None]
        return max((one for one in compared if one is not None), default=None)

    @property
    def num_repairs(self) -> int:
        """The number of times that differing replicas were repaired."""
        return sum(
            watch.num_repairs for watch in (self.in_backwards, self.after_meetings) if watch is not None
        )
