"""When a replica is compared with its peers': in backwards that average gradients, and after meetings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncline.gradients.riders.replica_watch import ReplicaCheck, ReplicaWatch
from syncline.transport.base import Transport

__all__ = ["ReplicaChecks"]


class ReplicaChecks:
    """What compares one replica with those of the other ranks; nothing where that was not asked for.

    Args:
        check: how; None for not at all.
    """

    def __init__(self, check: ReplicaCheck | None) -> None:
        self.in_backwards: ReplicaWatch | None = None
        """Between the ranks that average gradients."""
        self.after_meetings: ReplicaWatch | None = None
        """Between all ranks, under a strategy whose meetings make parameters equal."""
        self._check = check
        self._compared_at = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaChecks, (self._check,)  # without connections

    def are_needed(self, transport: Transport) -> bool:
        """Whether there is something to compare, and somebody to compare with."""
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
        """One for the ranks of `transport`; see `ReplicaWatch`.

        Args:
            title: of the module.
            parameters: that have to be equal.
            transport: between the ranks.
            ranks: their numbers.
            buffers: that take part.
            optimizers: those whose state has to be equal, as they are now.
            are_equal: whether all are equal now for sure.
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
        """All parameters have been made equal: see whether they are. A collective call.

        Raises:
            ReplicaDivergence: they are not, and so it was wanted; on every rank.
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
        """The step of the last comparison, and whether all were equal; None before the first."""
        watches = (self.in_backwards, self.after_meetings)
        compared = [watch.last_compared for watch in watches if watch is not None]
        return max((one for one in compared if one is not None), default=None)

    @property
    def num_repairs(self) -> int:
        """How often replicas were made equal because they were not."""
        return sum(
            watch.num_repairs for watch in (self.in_backwards, self.after_meetings) if watch is not None
        )
