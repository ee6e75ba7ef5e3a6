"""The matching of the calls of ranks that are threads of one process.

A `Rendezvous` is one collective or message under way. The n-th collective of a rank is matched with the n-th collective
of every other rank. The n-th `send` from rank a to rank b is matched with the n-th `recv` of rank b from rank a. As in
Gloo and NCCL, a `send` is complete when its message has been received. The first error breaks the whole group, and
every rank raises an error with the same text.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed, SynclineError, UnevenInputs
from syncline.liveness.board import MAIN_LANE, Board, Place, Wait, describe_late, describe_places
from syncline.liveness.calls import ENDLESS_WAIT, LATE, SAME_CALLS, Call, Failure, remedy_for_left
from syncline.liveness.deadlock import stuck_among
from syncline.liveness.processes import FORKED, refuse_in_forks
from syncline.transport.work import Disagreement
from syncline.words import describe_ranks


@dataclass(eq=False)
class Rendezvous:
    """One collective or message under way. A thread must hold the lock of the group to use its fields.

    A rank joins by making its call. The last rank that joins computes the result, which ends the rendezvous. Each rank
    copies the result when it waits.

    Args:
        members: the ranks that take part.
        title: the kind and the number of this rendezvous, for error messages.
        call_number: the number of the collective, from 1. It is None for a message.
        changed: a condition that uses the lock of the group. It is notified when the rendezvous ends.
    """

    members: tuple[int, ...]
    title: str
    call_number: int | None
    changed: threading.Condition
    calls: dict[int, Call] = field(default_factory=dict)
    parts: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    failure: Failure | None = None
    has_ended: bool = False
    """Whether the rendezvous has a result, a failure or a disagreement."""
    has_disagreed: bool = False
    """Whether all calls had `terms`, but the calls or the terms differed. Then there is no result and no failure."""

    def end(self, result: Any = None, failure: Failure | None = None) -> None:
        """End the rendezvous with a result or a failure, and wake up the ranks that wait for it."""
        assert not self.has_ended, f"{self.title} has ended twice"
        self.result, self.failure, self.has_ended = result, failure, True
        self.parts = {}
        self.changed.notify_all()

    @property
    def needs_ranks(self) -> bool:
        """Whether the rendezvous has not ended, and some members have not joined yet."""
        return not self.has_ended and len(self.calls) < len(self.members)

    def agrees(self) -> bool:
        """Return whether all ranks that have joined have made matching calls."""
        first, *others = self.calls.values()
        return all(first.agrees_with(other) for other in others)

    def absent(self) -> list[int]:
        """Return the members that have not joined yet."""
        return [rank for rank in self.members if rank not in self.calls]

    def describe_calls(self) -> str:
        """Return lines of text for error messages, which show the call of each member."""
        by_call: dict[str, list[int]] = {}
        for rank in self.members:
            call = self.calls.get(rank)
            by_call.setdefault("has not called yet" if call is None else str(call), []).append(rank)
        return "\n".join(f"  {describe_ranks(ranks)}: {call}" for call, ranks in by_call.items())


@dataclass(eq=False)
class _Common:
    """The state that all lanes of one group have in common."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: Failure | None = None
    gone: dict[int, str] = field(default_factory=dict)
    """A map from each rank that makes no more calls to the reason why."""
    boards: dict[int, Board] = field(default_factory=dict)
    waiting: dict[tuple[int, int], tuple[CallMatcher, Rendezvous]] = field(default_factory=dict)
    """A map from (rank, thread identifier) to the rendezvous for which this thread waits now, and its matcher.

    Several threads of a rank can wait, for instance one for a checkpoint and one for gradients.
    """
    threads: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """A map from rank to the identifiers of its threads that have waited at least once."""
    lanes: weakref.WeakSet[CallMatcher] = field(default_factory=weakref.WeakSet)
    children: weakref.WeakSet[CallMatcher] = field(default_factory=weakref.WeakSet)
    is_forked: bool = False

    def refuse_a_fork(self) -> None:
        """Make every later call raise an error. Forked child processes call this, as they lack the ranks' threads."""
        self.is_forked = True


class CallMatcher:
    """The matcher of one lane, which assigns each call of a rank to a `Rendezvous`.

    The first error breaks all lanes of the group.

    Args:
        size: number of ranks.
        lane: the name of the lane.
        common: the state that all lanes of the group have in common. Pass None for the first lane of a group.
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
        """Return the matcher of a new group of some of the ranks. If this group breaks, the new group breaks, too."""
        matcher = CallMatcher(len(ranks))
        matcher._ranks_in_parent = ranks
        with self._lock:
            self._common.children.add(matcher)
            matcher._common.failure = self.failure
        return matcher

    def lane(self, name: str) -> CallMatcher:
        """Return the matcher of a new lane between the same ranks."""
        with self._lock:
            return CallMatcher(self.size, name, self._common)

    def register_board(self, rank: int, board: Board) -> None:
        """Register the board of `rank`, which tells errors where in the program this rank is."""
        self._common.boards[rank] = board

    @property
    def failure(self) -> Failure | None:
        """The failure that broke the group. The value is None if the group is intact."""
        return self._common.failure

    def join(
        self,
        rank: int,
        call: Call,
        part: Any,
        compute: Callable[[list[Any]], Any],
        channel: tuple[int, int] | None = None,
    ) -> Rendezvous:
        """Let `rank` join its next rendezvous, and return this rendezvous.

        The last rank that joins computes the result.

        Args:
            rank: the rank that joins.
            call: a description of the call, which must match the calls of the other members.
            part: the data that this rank contributes.
            compute: a function that computes the result from the parts of all members, in rank order.
            channel: the pair (src, dst) for a message, or None for a collective.
        """
        self._refuse_a_fork()
        with self._lock:
            if self.failure is not None:
                raise self.failure.on_rank(rank)
            if rank in self._common.gone:
                raise closed_error(call, rank)
            nth = self._num_joined[rank, channel]
            self._num_joined[rank, channel] += 1
            rendezvous = self._pending.get((channel, nth))
            if rendezvous is None:
                rendezvous = self._pending[channel, nth] = self._new_rendezvous(channel, nth)
            rendezvous.calls[rank] = call
            rendezvous.parts[rank] = part
            self._check(rendezvous)
            if rendezvous.has_ended or rendezvous.needs_ranks:
                return rendezvous
            del self._pending[channel, nth]
            if not rendezvous.agrees():
                rendezvous.has_disagreed = True
                rendezvous.end()
                return rendezvous
            parts = [rendezvous.parts[member] for member in rendezvous.members]
        self._compute(rendezvous, compute, parts)
        return rendezvous

    def _new_rendezvous(self, channel: tuple[int, int] | None, nth: int) -> Rendezvous:
        """Return a new rendezvous for collective number `nth`, or for message number `nth` on `channel`.

        Both numbers count from 0.
        """
        members = tuple(range(self.size)) if channel is None else tuple(sorted(channel))
        what = "collective" if channel is None else f"message from rank {channel[0]} to {channel[1]}"
        where = "" if self.name == MAIN_LANE else f" on the {self.name} lane"
        call_number = nth + 1 if channel is None else None
        return Rendezvous(
            members, f"{what} number {nth}{where}", call_number, threading.Condition(self._lock)
        )

    def _refuse_a_fork(self) -> None:
        if (
            self._common.is_forked
        ):  # read without the lock, which a thread of the parent may have held at the fork
            raise FORKED.on_rank(None)

    def _check(self, rendezvous: Rendezvous) -> None:
        """Break the group if the calls differ, or if the rendezvous needs a rank that has left.

        The caller must hold the lock.
        """
        first = next(iter(rendezvous.calls.values()))
        if not rendezvous.agrees() and not all(call.terms for call in rendezvous.calls.values()):
            text = (
                f"the ranks made different calls ({rendezvous.title} of this group of {self.size}):\n"
                f"{rendezvous.describe_calls()}\n{self._describe_places()}\n{SAME_CALLS}"
            )
            self._break_locked(Failure(CollectiveMismatch, text))
            return
        gone, boards = self._common.gone, self._common.boards
        rank = next((rank for rank in rendezvous.absent() if rank in gone), None)
        if rank is not None:
            waiting = next(iter(rendezvous.calls))
            remedy = remedy_for_left(Place.of(boards[waiting]), [Place.of(boards[rank])])
            text = (
                f"{first} ({rendezvous.title} of this group of {self.size}) needs rank {rank}, "
                f"which makes no more calls, because {gone[rank]}\n{rendezvous.describe_calls()}\n"
                f"{self._describe_places()}\n{remedy}"
            )
            self._break_locked(Failure(UnevenInputs, text))

    def _compute(self, rendezvous: Rendezvous, compute: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        try:
            result = compute(parts)
        except BaseException as error:
            # The other ranks raise this failure, and this rank raises the error itself.
            failure = Failure(PeerFailed, f"{rendezvous.title} could not be computed: {error!r}")
            with self._lock:
                rendezvous.end(failure=failure)
                self._break_locked(failure)
            raise
        with self._lock:
            rendezvous.end(result)

    def wait(self, rank: int, rendezvous: Rendezvous, timeout_seconds: float) -> Any:
        """Wait until the rendezvous has ended, and return its result or raise its failure."""
        self._refuse_a_fork()
        waiting, thread = self._common.waiting, threading.get_ident()
        with self._lock:
            waiting[rank, thread] = self, rendezvous
            self._common.threads[rank].add(thread)
            try:
                self._check_for_deadlock()
                if not rendezvous.changed.wait_for(lambda: not rendezvous.needs_ranks, timeout_seconds):
                    self._time_out(rank, rendezvous, timeout_seconds)
                rendezvous.changed.wait_for(lambda: rendezvous.has_ended)
            finally:
                waiting.pop((rank, thread), None)
            if rendezvous.failure is not None:
                raise rendezvous.failure.on_rank(rank)
            if rendezvous.has_disagreed:
                raise Disagreement(
                    f"the ranks made different calls ({rendezvous.title}):\n{rendezvous.describe_calls()}"
                )
            return rendezvous.result

    def _check_for_deadlock(self) -> None:
        """Break the group if ranks wait for each other in different rendezvous.

        Ranks of which several threads have ever waited are left out, because a second thread could make the missing
        calls. The caller must hold the lock.
        """
        waits_for = {
            rank: rendezvous.absent()
            for (rank, _), (_, rendezvous) in self._common.waiting.items()
            if rendezvous.needs_ranks and len(self._common.threads[rank]) == 1
        }
        if stuck_among(waits_for):
            text = f"{ENDLESS_WAIT}\n{self._describe_places()}\n{SAME_CALLS}"
            self._break_locked(Failure(CollectiveMismatch, text))

    def _time_out(self, rank: int, rendezvous: Rendezvous, timeout_seconds: float) -> None:
        call, places = rendezvous.calls[rank], self._places()
        late = describe_late(rendezvous.absent(), places, places[rank], str(call), timeout_seconds)
        text = (
            f"{late}\n{call} ({rendezvous.title} of this group of {self.size}) failed on rank {rank}\n"
            f"{rendezvous.describe_calls()}\n{self._describe_places()}\n{LATE}"
        )
        self._break_locked(Failure(CollectiveTimeout, text))

    def _describe_places(self) -> str:
        return describe_places(self._places(), size=self.size)

    def _places(self) -> dict[int, Place]:
        common = self._common
        places = {}
        for rank, board in common.boards.items():
            waits = (
                Wait(lane=matcher.name, call=rendezvous.call_number, words=str(rendezvous.calls[rank]))
                for (waiting, _), (matcher, rendezvous) in common.waiting.items()
                if waiting == rank
            )
            places[rank] = Place.of(board, wait=next(waits, None), has_left=rank in common.gone)
        return places

    def break_(self, failure: Failure) -> None:
        """Make all current and later calls fail, in this group and in the groups that were split from it."""
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
                rendezvous.end(failure=common.failure)
            matcher._pending = {}

    def leave(self, rank: int, why: str, *, with_children: bool = False) -> None:
        """Record that `rank` makes no more calls on any lane. If another rank waits for it, the group breaks.

        Args:
            rank: the rank that makes no more calls.
            why: the reason, for error messages.
            with_children: whether the record also applies to the groups that were split from this group.
        """
        common = self._common
        with self._lock:
            common.gone.setdefault(rank, why)
            for matcher in common.lanes:
                for rendezvous in list(matcher._pending.values()):
                    if rendezvous.needs_ranks and rank in rendezvous.absent():
                        matcher._check(rendezvous)
            children = list(common.children) if with_children else []
        for child in children:
            if rank in child._ranks_in_parent:
                child.leave(child._ranks_in_parent.index(rank), why, with_children=True)


def closed_error(call: Call, rank: int) -> SynclineError:
    """Return the error for a call that `rank` made on its transport after it had closed the transport."""
    return SynclineError(
        f"rank {rank} called {call}, but it had already closed its transport. Make all calls before close()"
    )
