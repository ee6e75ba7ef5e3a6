"""All ranks stop after the same step because one of them was asked to.

Whether they do is agreed with the control data of backwards that are reduced, or else by a collective of its own (see
`gradients/stop_vote.py`). Which of the two follows from what all ranks have done alike, never from what one rank knows.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.algorithms.join import Joinable

from syncline._torch.modules import is_in_join
from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count
from syncline.differences import describe_ranks, ranks_with
from syncline.errors import SynclineError
from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.stop_request import (
    EXIT_STOPPED,
    Stopped,
    StopRequest,
    checked_signals,
    forget,
    listen,
    rearm,
)
from syncline.transport.base import Transport

__all__ = ["JointStop"]


class JointStop:
    """Whether ranks stop now, and how that ends.

    Args:
        transport: between the ranks.
        signals: that ask this process to stop, from the first question on.
        every: of so many questions that need a collective of their own, one is asked.

    Raises:
        TypeError, ValueError: `signals` or `every` make no sense.
    """

    def __init__(self, transport: Transport, signals: Sequence[str | int], every: int) -> None:
        checked_count("stop_every", every, at_least=1)
        self.request = StopRequest()
        self._signals = checked_signals(signals)
        self._transport = transport
        self._every = every
        self._vote = StopVote(self.request)
        self._num_received = 0
        self._num_without_backward = 0
        """Calls of `is_agreed` without a backward that carried votes since the one before."""
        self._lane: Transport | None = None
        self._is_listening = False

    def describe(self) -> list[str]:
        """What has to be the same on all ranks."""
        return [
            f"stop_signals  {', '.join(number.name for number in self._signals) or 'none'}",
            f"stop_every  {self._every}",
        ]

    def is_agreed(self, state: TrainState) -> bool:
        """Whether all ranks stop now; a collective call, which sends nothing where a backward has carried the votes."""
        if not self._is_listening:
            self._listen()
        if self._transport.size == 1:
            if self.request.is_asked:
                self._vote.asked_ranks = (0,)
            return self.request.is_asked
        route = self._route(state)
        has_received = self._vote.num_received != self._num_received
        self._num_received = self._vote.num_received
        if not has_received and route is not VoteRoute.GRADIENTS_ONLY:
            if self._lane is None:
                self._lane = self._transport.lane("stopping")
            if self._num_without_backward % self._every == 0:
                self._vote.gather(self._lane)
            self._num_without_backward += 1
        return bool(self._vote.asked_ranks)

    def _route(self, state: TrainState) -> VoteRoute:
        """Let the wrapped modules carry the vote; return how it travels."""
        routes: set[VoteRoute] = set()
        for one in state.named.values():
            replica = replica_of(one)
            if replica is not None:
                inside_join = isinstance(one, Joinable) and is_in_join(one)
                routes.add(replica.send_stop_vote(self._vote, self._transport, inside_join=inside_join))
        for route in (VoteRoute.GRADIENTS_ONLY, VoteRoute.GRADIENTS):
            if route in routes:
                return route
        return VoteRoute.COLLECTIVE

    def _listen(self) -> None:
        self._is_listening = True
        if listen(self.request, self._signals):
            # Not at the end of the program: until it has ended, the signals must not do what they did before.
            weakref.finalize(self, forget, self.request).atexit = False
        elif self._signals:
            warnings.warn(
                "sl.Checkpointer.stop_if_asked: only the main thread can listen to signals, and this is another, so "
                "that none will be noticed on this rank. Call it in the main thread; or give stop_signals=() and call "
                "checkpointer.ask_to_stop() where the end is announced",
                RuntimeWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Listen no more, unless the end of this process is what was agreed: until then signals must not do harm."""
        if self._vote.asked_ranks:
            return
        if self._is_listening:
            forget(self.request)
        if self._lane is not None and self._lane is not self._transport:
            self._lane.close()

    def end(self, lane: Transport, step: int, saved: str | None, last: Any) -> None:
        """End this process as all others.

        Args:
            lane: on which nothing is under way.
            step: after which all ranks stop.
            saved: where; None if it could not be saved.
            last: what was saved before, for the message; None if nothing was.

        Raises:
            Stopped: it is saved.
            SynclineError: it is not.
        """
        told = [json.loads(row) for row in lane.all_gather_bytes(json.dumps(self.request.why).encode())]
        whys = {rank: why for rank, why in enumerate(told) if why is not None}
        reason = _in_words(whys, lane.size)
        if saved is None:
            raise SynclineError(
                f"{reason}: stopped after step {step}, but the state could not be saved (a warning says why). Saved "
                f"before: {last or 'nothing'}"
            )
        if lane.rank == 0:
            print(
                f"syncline: {reason}: stopped after step {step}, saved in {saved} (exit code {EXIT_STOPPED}: start "
                "again to go on)",
                file=sys.stderr,
                flush=True,
            )
        # From here to the end of the process is not long: a launcher that tells the ranks that are left to end, because
        # one has ended already, must not make it another end.
        rearm()
        raise Stopped


def _in_words(whys: dict[int, str], num_ranks: int) -> str:
    if num_ranks == 1:
        return f"this process {whys[0]}"
    return ", ".join(f"{describe_ranks(ranks)} {why}" for why, ranks in ranks_with(whys).items())
