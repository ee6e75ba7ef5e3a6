"""Control data that travels by itself, where no bucket can carry it: under a communication hook, or beside sparse
gradients, of which nobody knows before the end what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.transport.base import Transport, Work

__all__ = ["ControlMessage"]


class ControlMessage:
    """One small asynchronous collective a step.

    Args:
        transport: what it travels by.
        numel: elements, see `ControlForm.numel`.
    """

    def __init__(self, transport: Transport, numel: int) -> None:
        self._transport = transport
        self._tensor = torch.zeros(numel, dtype=torch.int32, device=transport.control_device)
        self._work: Work | None = None

    def launch(self, tail: Sequence[int]) -> None:
        """Send this rank's tail; an empty one is all zeros."""
        if any(tail):
            self._tensor.copy_(torch.tensor(tail, dtype=torch.int32))
        else:
            self._tensor.zero_()
        self._work = self._transport.all_reduce(self._tensor, "sum")

    def read(self) -> list[float]:
        """Wait, then the control data of all ranks, summed."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        summed: list[float] = self._tensor.tolist()
        return summed
