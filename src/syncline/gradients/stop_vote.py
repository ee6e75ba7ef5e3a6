"""Which ranks were asked to stop, as all ranks know it after the same step.

One rank gets the signal, and no rank may act on what it alone knows. So each votes, with the control data of a
backward that is reduced (`control.py`), which costs nothing, or where there is none, in a collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from syncline.gradients.tail import RankControl
from syncline.session.stop_request import StopRequest
from syncline.transport.agreement import gather_rows
from syncline.transport.base import Transport

__all__ = ["StopVote", "VoteRoute"]


class VoteRoute(Enum):
    """How the votes travel; the same on all ranks."""

    GRADIENTS = "with gradients"
    """Each synchronized backward carries them."""
    COLLECTIVE = "in a collective of their own"
    GRADIENTS_ONLY = "with gradients only"
    """Synchronized backwards carry them; a collective would miss ranks without inputs (inside of `join`)."""


class StopVote:
    """This rank's vote on stopping, and the outcome of all votes.

    Args:
        request: whether this process was asked.

    Example:
        >>> vote = StopVote(StopRequest())
        >>> vote.receive([RankControl(), RankControl(stop=True)])
        >>> vote.asked_ranks
        (1,)
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.asked_ranks: tuple[int, ...] = ()
        """The ranks that were asked when it was agreed to stop; empty before."""
        self.num_received = 0
        """How many backwards carried the votes."""

    def receive(self, ranks: Sequence[RankControl]) -> None:
        """Count the votes that a synchronized backward carried.

        Args:
            ranks: the control data of each rank; empty where no rank sent any.
        """
        self.num_received += 1
        if not ranks or self.asked_ranks:
            return
        asked = tuple(rank for rank, control in enumerate(ranks) if control.stop)
        # A rank without inputs left cannot stop there; the others vote again once it is back.
        if asked and not any(control.joined for control in ranks):
            self.asked_ranks = asked

    def gather(self, transport: Transport) -> None:
        """Gather and count the votes without a backward; a collective call that blocks."""
        mine = torch.tensor([int(self.request.is_asked)], dtype=torch.int32)
        rows = gather_rows(transport, mine)
        if not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, row in enumerate(rows) if row.item())
