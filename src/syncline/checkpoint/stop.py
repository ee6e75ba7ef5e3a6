"""Stop all ranks after the same step when one of them was asked to stop.

Each rank votes on whether to stop. The votes travel with the control data of a backward, or in a separate collective
(see `gradients/riders/requests.py`). The choice between these two ways depends only on calls that all ranks have made,
never on the state of one rank.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.algorithms.join import Joinable

from syncline._torch.modules import is_in_join
from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count
from syncline.errors import SynclineError
from syncline.gradients.riders.requests import StopVote, VoteRoute
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.stop_request import EXIT_STOPPED, Stopped, StopRequest, checked_signals
from syncline.transport.base import Transport
from syncline.user_code import warn_user
from syncline.words import describe_ranks, ranks_with


class JointStop:
    """An agreement of all ranks on whether to stop. After they have agreed to stop, `end` ends the process.

    Args:
        transport: the transport between the ranks.
        signals: the signals that ask this process to stop. The first call of `is_agreed` installs their handlers.
        every: the number of calls of `is_agreed` for each separate collective that they run. Calls that need no
            separate collective do not count.

    Raises:
        TypeError, ValueError: `signals` or `every` is invalid.
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
        """The number of calls of `is_agreed` that could not use votes from a backward."""
        self._lane: Transport | None = None
        self._is_listening = False

    def describe(self) -> list[str]:
        """Return the settings that must be the same on all ranks, one per line."""
        return [
            f"stop_signals  {', '.join(number.name for number in self._signals) or 'none'}",
            f"stop_every  {self._every}",
        ]

    def use_transport(self, transport: Transport) -> None:
        """Vote with other ranks from now on. All of them make this call.

        Some ranks of the former group may have received votes that others have not. So the next call of `is_agreed`
        gathers all votes anew.
        """
        self._transport, self._lane = transport, None
        self._num_without_backward = 0
        self._vote.asked_ranks, self._vote.num_received = (), self._num_received

    def is_agreed(self, state: TrainState) -> bool:
        """Return whether all ranks stop now. A collective call; it sends nothing if a backward carried the votes."""
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
        """Hand this rank's vote to the wrapped modules, and return the route by which the votes travel."""
        routes: set[VoteRoute] = set()
        for one in state.named.values():
            replica = replica_of(one)
            if replica is not None:
                inside_join = isinstance(one, Joinable) and is_in_join(one)
                routes.add(replica.send_stop_vote(self._vote, self._transport, inside_join=inside_join))
        order = (VoteRoute.GRADIENTS_ONLY, VoteRoute.GRADIENTS)
        return next((route for route in order if route in routes), VoteRoute.COLLECTIVE)

    def _listen(self) -> None:
        self._is_listening = True
        if self.request.listen(self._signals):
            # Not at exit: until the process has ended, the signals must not regain their usual effect.
            weakref.finalize(self, self.request.forget).atexit = False
        elif self._signals:
            warn_user(
                "sl.Checkpointer.stop_if_asked: only the main thread can handle signals, and this is another thread, "
                "so signals will not stop this rank. Call stop_if_asked in the main thread. Otherwise, create the "
                "sl.Checkpointer with stop_signals=(), and ask for a stop with checkpointer.ask_to_stop()"
            )

    def close(self) -> None:
        """Remove the signal handlers, unless the ranks have agreed to stop.

        After such an agreement, the handlers stay until the process ends.
        """
        if self._vote.asked_ranks:
            return
        self.request.forget()
        if self._lane is not None and self._lane is not self._transport:
            self._lane.close()

    def end(self, lane: Transport, step: int, saved: str | None, last: Any) -> None:
        """Raise the exception that ends this process. A collective call, after which all ranks end.

        Args:
            lane: a transport on which no collective is in progress.
            step: the step after which all ranks stop.
            saved: the directory of the save of this step; None if the state could not be saved.
            last: the directory of the last save, for the message; None if there is no save.

        Raises:
            Stopped: the state is saved, and the ranks stop.
            SynclineError: the state could not be saved.
        """
        reasons = [json.loads(row) for row in lane.all_gather_bytes(json.dumps(self.request.why).encode())]
        whys = {rank: why for rank, why in enumerate(reasons) if why is not None}
        reason = _in_words(whys, lane.size)
        if saved is None:
            raise SynclineError(
                f"{reason}: all ranks stopped after step {step}, but the state could not be saved (a warning has the "
                f"reason). The last save is {last or 'none'}"
            )
        if lane.rank == 0:
            print(
                f"syncline: {reason}: stopped after step {step}, saved in {saved} (exit code {EXIT_STOPPED}: start "
                "again to resume)",
                file=sys.stderr,
                flush=True,
            )
        # This process ends soon. A launcher that sees one rank end may signal the others to end, and such a signal
        # must not change this rank's exit code.
        self.request.rearm()
        raise Stopped


def _in_words(whys: dict[int, str], num_ranks: int) -> str:
    """Return the reasons as text. Each reason follows the ranks that gave it."""
    if num_ranks == 1:
        return f"this process {whys[0]}"
    return ", ".join(f"{describe_ranks(ranks)} {why}" for why, ranks in ranks_with(whys).items())
