"""Which ranks were asked to stop, as all ranks know it after the same step.

One rank gets the signal, and no rank may act on what it alone knows. So each votes, with the control data of a
backward that is reduced (`control.py`), which costs nothing, or where there is none, in a collective of its own.
"""

from __future__ import annotations

from enum import Enum

import torch

from syncline.gradients.riders.base import Rider, Words
from syncline.session.stop_request import StopRequest
from syncline.transport.agreement import gather_rows
from syncline.transport.base import Transport

__all__ = ["Stop", "StopVote", "VoteRoute"]


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
        >>> from syncline.transport.threads import ThreadGroup
        >>> vote.receive(Words((0, 1), step=1, transport=ThreadGroup(2).transport(0)))
        >>> vote.asked_ranks
        (1,)
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.asked_ranks: tuple[int, ...] = ()
        """The ranks that were asked when it was agreed to stop; empty before."""
        self.num_received = 0
        """How many backwards carried the votes."""

    def receive(self, words: Words) -> None:
        """Take the words of a backward that was reduced."""
        # A rank without inputs left is where it cannot stop; the others report again once it is back.
        if words.any_set and not words.any_joined and not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, word in words.active.items() if word)

    def gather(self, transport: Transport) -> None:
        """Gather the votes without a backward; a collective call that blocks."""
        mine = torch.tensor([int(self.request.is_asked)], dtype=torch.int32)
        rows = gather_rows(transport, mine)
        if not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, row in enumerate(rows) if row.item())


class Stop(Rider):
    """Reports whether this process was asked to stop, once something would act on it."""

    num_bits = 1

    def __init__(self) -> None:
        self.vote: StopVote | None = None

    def word(self) -> int:
        """Return 1 if this process was asked to stop."""
        return int(self.vote is not None and self.vote.request.is_asked)

    def hear(self, words: Words) -> None:
        """Hand the words to the vote."""
        if self.vote is not None:
            self.vote.num_received += 1
            self.vote.receive(words)

    def hear_silence(self, step: int) -> None:
        """No rank was asked."""
        if self.vote is not None:
            self.vote.num_received += 1
