"""Riders: requests that reach one rank, and that all ranks follow after the same step: to stop, to let a process join.

If only one rank gets the signal to stop, it must not stop before all other ranks know of the signal. So each rank
votes. The votes travel with the gradients of a synchronized backward, at no extra cost. If no such backward carries
them, a separate collective sends them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.session.stop_request import StopRequest
from syncline.transport.agreement import gather_rows
from syncline.transport.base import Transport


class StopVote:
    """This rank's vote on stopping, and the result of the vote of all ranks.

    Args:
        request: the object that knows whether this process was asked to stop.

    Examples:
        >>> vote = StopVote(StopRequest())
        >>> from syncline.transport.threads import ThreadGroup
        >>> vote.receive(Words((0, 1), step=1, transport=ThreadGroup(2).transport(0)))
        >>> vote.asked_ranks
        (1,)
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.asked_ranks: tuple[int, ...] = ()
        """The ranks that had been asked to stop when all ranks agreed to stop. It is empty until then."""
        self.num_received = 0
        """The number of backwards that have carried the votes."""

    def receive(self, words: Words) -> None:
        """Store which ranks voted for stopping, if any rank did.

        Args:
            words: the votes that a synchronized backward carried.
        """
        # A rank without inputs cannot stop inside of `join`. The ranks vote again when it has left `join`.
        if words.any_set and not words.any_joined and not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, word in words.active.items() if word)

    def gather(self, transport: Transport) -> None:
        """Gather the votes of all ranks in a collective of their own, and wait for the result."""
        mine = torch.tensor([int(self.request.is_asked)], dtype=torch.int32, device="cpu")
        rows = gather_rows(transport, mine)
        if not self.asked_ranks:
            self.asked_ranks = tuple(rank for rank, row in enumerate(rows) if row.item())


class Stop(Rider):
    """A report of whether this process was asked to stop. Until `carry` is called, the word is 0."""

    subject = "requests to stop"
    num_bits = 1

    def __init__(self) -> None:
        self._vote: StopVote | None = None

    def carry(self, vote: StopVote) -> None:
        """Report this rank's vote in each synchronized backward from now on.

        Args:
            vote: the object that holds the vote.
        """
        self._vote = vote

    def word(self, backward: Backward) -> int:
        """Return 1 if this process was asked to stop, else 0."""
        return int(self._vote is not None and self._vote.request.is_asked)

    def receive(self, words: Words) -> None:
        """Pass the words of all ranks to the vote."""
        if self._vote is not None:
            self._vote.num_received += 1
            self._vote.receive(words)

    def receive_nothing(self, step: int) -> None:
        """Count a backward in which no rank reported a request to stop."""
        if self._vote is not None:
            self._vote.num_received += 1


class Newcomers(Rider):
    """A report of whether this rank has seen a process that waits to join. The word is 0 outside of `sl.steps`."""

    subject = "processes that wait to join"
    num_bits = 1

    def __init__(self) -> None:
        self.look: Callable[[], bool] | None = None
        """A function that looks whether a process waits. `sl.steps` sets it while it runs."""
        self.are_waiting = False
        """Whether a rank has reported that a process waits. `sl.steps` resets it."""

    def word(self, backward: Backward) -> int:
        """Return 1 if this rank has seen a process that waits, else 0."""
        return int(self.look is not None and self.look())

    def receive(self, words: Words) -> None:
        """Remember whether a rank has seen a process that waits."""
        self.are_waiting = self.are_waiting or words.any_set
