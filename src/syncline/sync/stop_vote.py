"""Which ranks were asked to stop, as all ranks know it after the same step.

One rank gets the signal, and no rank may act on what it alone knows. So each tells all others, with the control data of
a backward that is reduced (`control.py`), which costs nothing, or where there is none, by a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from syncline.stopping import StopRequest
from syncline.sync.agreement import gather_rows
from syncline.sync.control import RankControl
from syncline.transport.base import Transport

__all__ = ["StopVote", "Told"]


class Told(Enum):
    """How ranks tell each other; the same on all ranks."""

    WITH_GRADIENTS = "with gradients"
    """Each backward that is reduced tells it."""
    BY_ITSELF = "by itself"
    """It takes a collective of its own."""
    NOT_NOW = "not now"
    """Ranks are not all there to be asked (inside of `join`), but backwards that are reduced tell it."""


class StopVote:
    """What this rank tells, and what all have told.

    Args:
        request: whether this process was asked.

    Example:
        >>> vote = StopVote(StopRequest())
        >>> vote.hear([RankControl(), RankControl(stop=True)])
        >>> vote.asked_ranks
        (1,)
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.asked_ranks: tuple[int, ...] = ()
        """The ranks that were asked when it was agreed to stop; empty before."""
        self.num_heard = 0
        """Backwards that told it."""

    def hear(self, ranks: Sequence[RankControl]) -> None:
        """A backward was reduced.

        Args:
            ranks: what each rank told; empty where none had anything to tell.
        """
        self.num_heard += 1
        if not ranks or self.asked_ranks:
            return
        asked = tuple(rank for rank, control in enumerate(ranks) if control.stop)
        # A rank without inputs left is where it cannot stop; the others will tell again once it is back.
        if asked and not any(control.joined for control in ranks):
            self.asked_ranks = asked

    def ask_all(self, transport: Transport) -> None:
        """The same without a backward; a collective call that blocks."""
        mine = torch.tensor([int(self.request.is_asked)], dtype=torch.int32)
        rows = gather_rows(transport, mine)
        if not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, row in enumerate(rows) if row.item())
