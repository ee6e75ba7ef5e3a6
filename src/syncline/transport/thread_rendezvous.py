"""Rendezvous of ranks that are threads: one state machine per collective or message under way.

The n-th collective of a rank is matched with the n-th collective of every other rank. The n-th `send` from a to b is
matched with b's n-th `recv` from a. As in Gloo and NCCL, a `send` is complete when it was received. The first error
breaks the whole group, so every rank raises the same text.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from syncline.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed, SynclineError, UnevenInputs
from syncline.liveness.board import MAIN_LANE, Board, Place, Wait, describe_places
from syncline.liveness.calls import (
    ENDLESS_WAIT,
    SAME_CALLS,
    Call,
    Failure,
    lane_name,
    remedy_for_left,
)
from syncline.liveness.deadlock import stuck_among
from syncline.liveness.processes import FORKED, refuse_in_forks
from syncline.transport.work import Disagreement
from syncline.words import describe_ranks


class State(enum.Enum):
    """The state of a rendezvous."""

    GATHERING = "gathering"
    """Some ranks have not joined yet."""
    COMPUTING = "computing"
    """All ranks have joined; the last of them computes the result."""
    DONE = "done"
    """The result is available; each rank copies it when it waits."""
    FAILED = "failed"
    """There is no result; each rank that waits raises."""


_MOVES = {
    State.GATHERING: {State.COMPUTING, State.FAILED},
    State.COMPUTING: {State.DONE, State.FAILED},
    State.DONE: set[State](),
    State.FAILED: set[State](),
}


class Rendezvous:
    """One collective or message under way. The group's lock guards all fields."""

    def __init__(
        self, lock: threading.Lock, members: tuple[int, ...], title: str, call_number: int | None
    ) -> None:
        self.members = members
        self.title = title
        self.call_number = call_number
        self.state = State.GATHERING
        self.calls: dict[int, Call] = {}
        self.parts: dict[int, Any] = {}
        self.result: Any = None
        self.failure: Failure | None = None
        self.has_disagreed = False
        """Whether all calls had terms but differed. There is no result then, and the group remains usable."""
        self.changed = threading.Condition(lock)

    def transition(self, to: State) -> None:
        assert to in _MOVES[self.state], f"{self.title}: {self.state} -> {to}"
        self.state = to
        if to is not State.COMPUTING:
            self.parts = {}
            self.changed.notify_all()

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.transition(State.FAILED)

    def agrees(self) -> bool:
        """Return whether all ranks that have joined made matching calls."""
        first, *others = self.calls.values()
        return all(first.agrees_with(other) for other in others)

    def absent(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.calls]

    def describe_calls(self) -> str:
        """Return the ranks by call as text, for messages."""
        by_call: dict[str, list[int]] = {}
        for rank in self.members:
            call = self.calls.get(rank)
            by_call.setdefault("has not called yet" if call is None else str(call), []).append(rank)
        return "\n".join(f"  {describe_ranks(ranks)}: {call}" for call, ranks in by_call.items())


class _Common:
    """The state that all lanes of one group have in common.

    It contains the lock, the ranks that have left, and the first failure, which breaks all lanes.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: Failure | None = None
        self.gone: dict[int, str] = {}
        self.boards: dict[int, Board] = {}
        self.waiting: dict[tuple[int, int], tuple[CallMatcher, Rendezvous]] = {}
        """Waits by rank and thread, because one thread may wait for a checkpoint while another trains."""
        self.threads: defaultdict[int, set[int]] = defaultdict(set)
        """The threads that have ever waited, by rank."""
        self.lanes: weakref.WeakSet[CallMatcher] = weakref.WeakSet()
        self.children: weakref.WeakSet[CallMatcher] = weakref.WeakSet()
        self.num_lanes_for: Counter[str] = Counter()
        self.is_forked = False

    def refuse_a_fork(self) -> None:
        """Refuse all use in this process, a fork of the process whose threads are the ranks."""
        self.is_forked = True


class CallMatcher:
    """The matching of the calls of `size` ranks. It breaks as a whole at the first error.

    Args:
        size: number of ranks.
        lane: the lane's name. Each lane of the same ranks has its own matcher, and all of them break together.
        common: the state of all lanes; None for the first matcher.
    """

    def __init__(self, size: int, lane: str = MAIN_LANE, common: _Common | None = None) -> None:
        self.size = size
        self.name = lane
        self._common = _Common() if common is None else common
        self._common.lanes.add(self)
        self._lock = self._common.lock
        self._pending: dict[tuple[object, int], Rendezvous] = {}
        self._num_joined: Counter[tuple[int, object]] = Counter()
        self._ranks_in_parent: tuple[int, ...] = ()
        if size > 1:
            refuse_in_forks(self._common)

    def child(self, ranks: tuple[int, ...]) -> CallMatcher:
        """Return a matcher for some of the ranks; it breaks when this matcher breaks."""
        matcher = CallMatcher(len(ranks))
        matcher._ranks_in_parent = ranks
        with self._lock:
            self._common.children.add(matcher)
            matcher._common.failure = self.failure
        return matcher

    def lane(self, purpose: str) -> CallMatcher:
        """Return another matcher for the same ranks."""
        common = self._common
        with self._lock:
            common.num_lanes_for[purpose] += 1
            return CallMatcher(self.size, lane_name(purpose, common.num_lanes_for[purpose]), common)

    def register_board(self, rank: int, board: Board) -> None:
        """Register the board of `rank`, which shows the others where it is."""
        self._common.boards[rank] = board

    @property
    def failure(self) -> Failure | None:
        """The failure that broke this matcher and the other lanes; None if there is none."""
        return self._common.failure

    def join(
        self,
        rank: int,
        call: Call,
        part: Any,
        compute: Callable[[list[Any]], Any],
        channel: tuple[int, int] | None = None,
    ) -> Rendezvous:
        """Let `rank` join its next rendezvous. The last rank to join computes the result.

        Args:
            rank: the rank that joins.
            call: its call, which must agree with its peers' calls.
            part: its contribution.
            compute: computes the result from the members' parts in rank order.
            channel: None for a collective, (src, dst) for a message.
        """
        self._refuse_a_fork()
        with self._lock:
            if self.failure is not None:
                raise self.failure.on_rank(rank)
            if rank in self._common.gone:
                raise SynclineError(f"{call}: rank {rank} cannot call this, its transport was closed")
            nth = self._num_joined[rank, channel]
            self._num_joined[rank, channel] += 1
            rendezvous = self._pending.get((channel, nth))
            if rendezvous is None:
                members = tuple(range(self.size)) if channel is None else tuple(sorted(channel))
                what = "collective" if channel is None else f"message from rank {channel[0]} to {channel[1]}"
                where = "" if self.name == MAIN_LANE else f" on the {self.name} lane"
                rendezvous = Rendezvous(
                    self._lock, members, f"{what} number {nth}{where}", nth + 1 if channel is None else None
                )
                self._pending[channel, nth] = rendezvous
            rendezvous.calls[rank] = call
            rendezvous.parts[rank] = part
            self._check(rendezvous)
            if rendezvous.state is State.FAILED or rendezvous.absent():
                return rendezvous
            del self._pending[channel, nth]
            parts = [rendezvous.parts[member] for member in rendezvous.members]
            rendezvous.transition(State.COMPUTING)
            if not rendezvous.agrees():
                rendezvous.has_disagreed = True
                rendezvous.transition(State.DONE)
                return rendezvous
        self._compute(rendezvous, compute, parts)
        return rendezvous

    def _refuse_a_fork(self) -> None:
        if self._common.is_forked:  # no lock: a thread that held it at the fork does not exist here
            raise FORKED.on_rank(None)

    def _check(self, rendezvous: Rendezvous) -> None:
        """Break the group if the calls differ, or if the rendezvous needs a rank that has left. Needs the lock."""
        first = next(iter(rendezvous.calls.values()))
        if not rendezvous.agrees() and not all(call.terms for call in rendezvous.calls.values()):
            text = (
                f"the ranks made different calls ({rendezvous.title} of this group of {self.size}):\n"
                f"{rendezvous.describe_calls()}\n{self._describe_places()}\n{SAME_CALLS}"
            )
            self._break_locked(Failure(CollectiveMismatch, text))
            return
        for rank in rendezvous.absent():
            if rank in self._common.gone:
                boards = self._common.boards
                waits = next(iter(rendezvous.calls))
                remedy = remedy_for_left(Place.of(boards[waits]), [Place.of(boards[rank])])
                text = (
                    f"{first} ({rendezvous.title} of this group of {self.size}) needs rank {rank}, "
                    f"which is gone: {self._common.gone[rank]}\n{rendezvous.describe_calls()}\n"
                    f"{self._describe_places()}\n{remedy}"
                )
                self._break_locked(Failure(UnevenInputs, text))
                return

    def _compute(self, rendezvous: Rendezvous, compute: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        try:
            result = compute(parts)
        except BaseException as error:
            # The other ranks raise this failure; this rank raises the error itself.
            failure = Failure(PeerFailed, f"{rendezvous.title} could not be computed: {error!r}")
            with self._lock:
                rendezvous.fail(failure)
                self._break_locked(failure)
            raise
        with self._lock:
            rendezvous.result = result
            rendezvous.transition(State.DONE)

    def wait(self, rank: int, rendezvous: Rendezvous, timeout_seconds: float) -> Any:
        """Wait for the rendezvous and return its result, or raise its failure."""
        self._refuse_a_fork()
        waiting, me = self._common.waiting, (rank, threading.get_ident())
        with self._lock:
            waiting[me] = self, rendezvous
            self._common.threads[rank].add(threading.get_ident())
            try:
                self._check_for_deadlock()
                all_joined = rendezvous.changed.wait_for(
                    lambda: rendezvous.state is not State.GATHERING, timeout_seconds
                )
                if not all_joined:
                    self._time_out(rank, rendezvous, timeout_seconds)
                rendezvous.changed.wait_for(lambda: rendezvous.state in (State.DONE, State.FAILED))
            finally:
                waiting.pop(me, None)
            if rendezvous.failure is not None:
                raise rendezvous.failure.on_rank(rank)
            if rendezvous.has_disagreed:
                raise Disagreement(f"{rendezvous.title}:\n{rendezvous.describe_calls()}")
            return rendezvous.result

    def _check_for_deadlock(self) -> None:
        """Break the group if ranks wait for each other in different rendezvous. Needs the lock.

        A rank counts only if no other thread of it could still make the missing calls.
        """
        waits_for = {
            rank: rendezvous.absent()
            for (rank, _), (_, rendezvous) in self._common.waiting.items()
            if rendezvous.state is State.GATHERING and len(self._common.threads[rank]) == 1
        }
        if stuck_among(waits_for):
            text = f"{ENDLESS_WAIT}\n{self._describe_places()}\n{SAME_CALLS}"
            self._break_locked(Failure(CollectiveMismatch, text))

    def _time_out(self, rank: int, rendezvous: Rendezvous, timeout_seconds: float) -> None:
        text = (
            f"{rendezvous.calls[rank]} ({rendezvous.title} of this group of {self.size}): "
            f"{describe_ranks(rendezvous.absent())} did not arrive within {timeout_seconds:g} s\n"
            f"{rendezvous.describe_calls()}\n{self._describe_places()}\n"
            "look at what the absent ranks do instead (an endless loop, fewer batches); "
            "if they are only slow, raise the timeout"
        )
        self._break_locked(Failure(CollectiveTimeout, text))

    def _describe_places(self) -> str:
        common = self._common
        places = {}
        for rank, board in common.boards.items():
            waits = (wait for (waiting, _), wait in common.waiting.items() if waiting == rank)
            matcher, rendezvous = next(waits, (None, None))
            wait = None
            if matcher is not None and rendezvous is not None:
                wait = Wait(lane=matcher.name, call=rendezvous.call_number, words=str(rendezvous.calls[rank]))
            places[rank] = Place.of(board, wait=wait, has_left=rank in common.gone)
        return describe_places(places, size=self.size)

    def break_(self, failure: Failure) -> None:
        """Fail all current and later rendezvous, here and in the children."""
        with self._lock:
            self._break_locked(failure)
            children = list(self._common.children)
        for child in children:
            child.break_(Failure(failure.kind, str(failure.on_rank(None))))

    def _break_locked(self, failure: Failure) -> None:
        common = self._common
        if common.failure is None:
            common.failure = failure
        for matcher in common.lanes:
            for rendezvous in matcher._pending.values():
                rendezvous.fail(common.failure)
            matcher._pending = {}

    def leave(self, rank: int, why: str, *, with_children: bool = False) -> None:
        """Record that `rank` makes no more calls on any lane. Peers that need it raise `UnevenInputs` at once."""
        common = self._common
        with self._lock:
            common.gone.setdefault(rank, why)
            for matcher in common.lanes:
                for rendezvous in list(matcher._pending.values()):
                    if rendezvous.state is State.GATHERING and rank in rendezvous.absent():
                        matcher._check(rendezvous)
            children = list(common.children) if with_children else []
        for child in children:
            if rank in child._ranks_in_parent:
                child.leave(child._ranks_in_parent.index(rank), why, with_children=True)
