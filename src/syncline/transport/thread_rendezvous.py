"""Rendezvous of ranks that are threads: one state machine per collective or message under way.

The n-th collective of a rank is matched with the n-th collective of every other rank. The n-th `send` from a to b is
matched with b's n-th `recv` from a. As in Gloo and NCCL, a `send` is complete when it was received. The first error
breaks the whole room, so every rank raises the same text.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from syncline.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed, SynclineError, UnevenInputs
from syncline.liveness.board import MAIN_LANE, Board, Place, Wait, who_is_where
from syncline.liveness.calls import SAME_CALLS, Call, Failure, lane_name, named_ranks, remedy_for_left
from syncline.liveness.deadlock import stuck_among
from syncline.liveness.processes import FORKED, refuse_in_forks
from syncline.transport.work import Disagreement

__all__ = ["Meeting", "MeetingRoom", "State"]


class State(enum.Enum):
    """The state of a meeting."""

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


class Meeting:
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

    def who_called_what(self) -> str:
        """Return the ranks by call as text, for messages."""
        by_call: dict[str, list[int]] = {}
        for rank in self.members:
            call = self.calls.get(rank)
            by_call.setdefault("has not called yet" if call is None else str(call), []).append(rank)
        return "\n".join(f"  {named_ranks(ranks)}: {call}" for call, ranks in by_call.items())


class _Family:
    """The state that all lanes of one group have in common.

    It contains the lock, the ranks that have left, and the first failure, which breaks all lanes.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: Failure | None = None
        self.gone: dict[int, str] = {}
        self.boards: dict[int, Board] = {}
        self.waiting: dict[tuple[int, int], tuple[MeetingRoom, Meeting]] = {}
        """Waits by rank and thread, because one thread may wait for a checkpoint while another trains."""
        self.threads: defaultdict[int, set[int]] = defaultdict(set)
        """The threads that have ever waited, by rank."""
        self.rooms: weakref.WeakSet[MeetingRoom] = weakref.WeakSet()
        self.children: weakref.WeakSet[MeetingRoom] = weakref.WeakSet()
        self.num_lanes_for: Counter[str] = Counter()
        self.is_forked = False

    def refuse_a_fork(self) -> None:
        """Refuse all use in this process, a fork of the process whose threads are the ranks."""
        self.is_forked = True


class MeetingRoom:
    """The matching of the calls of `size` ranks. It breaks as a whole at the first error.

    Args:
        size: number of ranks.
        lane: the lane's name. Each lane of the same ranks has its own room, and all of them break together.
        family: the state of all lanes; None for the first room.
    """

    def __init__(self, size: int, lane: str = MAIN_LANE, family: _Family | None = None) -> None:
        self.size = size
        self.name = lane
        self._family = _Family() if family is None else family
        self._family.rooms.add(self)
        self._lock = self._family.lock
        self._meetings: dict[tuple[object, int], Meeting] = {}
        self._num_joined: Counter[tuple[int, object]] = Counter()
        self._ranks_in_parent: tuple[int, ...] = ()
        if size > 1:
            refuse_in_forks(self._family)

    def child(self, ranks: tuple[int, ...]) -> MeetingRoom:
        """Return a room for some of the ranks; it breaks when this room breaks."""
        room = MeetingRoom(len(ranks))
        room._ranks_in_parent = ranks
        with self._lock:
            self._family.children.add(room)
            room._family.failure = self.failure
        return room

    def lane(self, purpose: str) -> MeetingRoom:
        """Return another room for the same ranks."""
        family = self._family
        with self._lock:
            family.num_lanes_for[purpose] += 1
            return MeetingRoom(self.size, lane_name(purpose, family.num_lanes_for[purpose]), family)

    def seat(self, rank: int, board: Board) -> None:
        """Register the board of `rank`, which shows the others where it is."""
        self._family.boards[rank] = board

    @property
    def failure(self) -> Failure | None:
        """The failure that broke this room and the other lanes; None if there is none."""
        return self._family.failure

    def join(
        self,
        rank: int,
        call: Call,
        part: Any,
        compute: Callable[[list[Any]], Any],
        channel: tuple[int, int] | None = None,
    ) -> Meeting:
        """Let `rank` join its next meeting. The last rank to join computes the result.

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
            if rank in self._family.gone:
                raise SynclineError(f"{call}: rank {rank} cannot call this, its transport was closed")
            nth = self._num_joined[rank, channel]
            self._num_joined[rank, channel] += 1
            meeting = self._meetings.get((channel, nth))
            if meeting is None:
                members = tuple(range(self.size)) if channel is None else tuple(sorted(channel))
                what = "collective" if channel is None else f"message from rank {channel[0]} to {channel[1]}"
                where = "" if self.name == MAIN_LANE else f" on the {self.name} lane"
                meeting = Meeting(
                    self._lock, members, f"{what} number {nth}{where}", nth + 1 if channel is None else None
                )
                self._meetings[channel, nth] = meeting
            meeting.calls[rank] = call
            meeting.parts[rank] = part
            self._check(meeting)
            if meeting.state is State.FAILED or meeting.absent():
                return meeting
            del self._meetings[channel, nth]
            parts = [meeting.parts[member] for member in meeting.members]
            meeting.transition(State.COMPUTING)
            if not meeting.agrees():
                meeting.has_disagreed = True
                meeting.transition(State.DONE)
                return meeting
        self._compute(meeting, compute, parts)
        return meeting

    def _refuse_a_fork(self) -> None:
        if self._family.is_forked:  # no lock: a thread that held it at the fork does not exist here
            raise FORKED.on_rank(None)

    def _check(self, meeting: Meeting) -> None:
        """Break the group if the calls differ, or if the meeting needs a rank that has left. Needs the lock."""
        first = next(iter(meeting.calls.values()))
        if not meeting.agrees() and not all(call.terms for call in meeting.calls.values()):
            text = (
                f"the ranks met in different calls ({meeting.title} of this group of {self.size}):\n"
                f"{meeting.who_called_what()}\n{self._who_is_where()}\n{SAME_CALLS}"
            )
            self._break_locked(Failure(CollectiveMismatch, text))
            return
        for rank in meeting.absent():
            if rank in self._family.gone:
                boards = self._family.boards
                waits = next(iter(meeting.calls))
                remedy = remedy_for_left(Place.of(boards[waits]), [Place.of(boards[rank])])
                text = (
                    f"{first} ({meeting.title} of this group of {self.size}) needs rank {rank}, "
                    f"which is gone: {self._family.gone[rank]}\n{meeting.who_called_what()}\n"
                    f"{self._who_is_where()}\n{remedy}"
                )
                self._break_locked(Failure(UnevenInputs, text))
                return

    def _compute(self, meeting: Meeting, compute: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        try:
            result = compute(parts)
        except BaseException as error:
            # The other ranks raise this failure; this rank raises the error itself.
            failure = Failure(PeerFailed, f"{meeting.title} could not be computed: {error!r}")
            with self._lock:
                meeting.fail(failure)
                self._break_locked(failure)
            raise
        with self._lock:
            meeting.result = result
            meeting.transition(State.DONE)

    def wait(self, rank: int, meeting: Meeting, timeout_seconds: float) -> Any:
        """Wait for the meeting and return its result, or raise its failure."""
        self._refuse_a_fork()
        waiting, me = self._family.waiting, (rank, threading.get_ident())
        with self._lock:
            waiting[me] = self, meeting
            self._family.threads[rank].add(threading.get_ident())
            try:
                self._check_that_ranks_can_go_on()
                came = meeting.changed.wait_for(lambda: meeting.state is not State.GATHERING, timeout_seconds)
                if not came:
                    self._time_out(rank, meeting, timeout_seconds)
                meeting.changed.wait_for(lambda: meeting.state in (State.DONE, State.FAILED))
            finally:
                waiting.pop(me, None)
            if meeting.failure is not None:
                raise meeting.failure.on_rank(rank)
            if meeting.has_disagreed:
                raise Disagreement(f"{meeting.title}:\n{meeting.who_called_what()}")
            return meeting.result

    def _check_that_ranks_can_go_on(self) -> None:
        """Break the group if ranks wait for each other in different meetings. Needs the lock.

        A rank counts only if no other thread of it could still make the missing calls.
        """
        waits_for = {
            rank: meeting.absent()
            for (rank, _), (_, meeting) in self._family.waiting.items()
            if meeting.state is State.GATHERING and len(self._family.threads[rank]) == 1
        }
        if stuck_among(waits_for):
            text = (
                "the ranks wait for each other in different calls, and none of them can ever continue:\n"
                f"{self._who_is_where()}\n{SAME_CALLS}"
            )
            self._break_locked(Failure(CollectiveMismatch, text))

    def _time_out(self, rank: int, meeting: Meeting, timeout_seconds: float) -> None:
        text = (
            f"{meeting.calls[rank]} ({meeting.title} of this group of {self.size}): "
            f"{named_ranks(meeting.absent())} did not come within {timeout_seconds:g} s\n"
            f"{meeting.who_called_what()}\n{self._who_is_where()}\n"
            "look at what the absent ranks do instead (an endless loop, fewer batches); "
            "if they are only slow, raise the timeout"
        )
        self._break_locked(Failure(CollectiveTimeout, text))

    def _who_is_where(self) -> str:
        family = self._family
        places = {}
        for rank, board in family.boards.items():
            waits = (wait for (waiting, _), wait in family.waiting.items() if waiting == rank)
            room, meeting = next(waits, (None, None))
            wait = None
            if room is not None and meeting is not None:
                wait = Wait(lane=room.name, call=meeting.call_number, words=str(meeting.calls[rank]))
            places[rank] = Place.of(board, wait=wait, has_left=rank in family.gone)
        return who_is_where(places, size=self.size)

    def break_(self, failure: Failure) -> None:
        """Fail all current and later meetings, here and in the children."""
        with self._lock:
            self._break_locked(failure)
            children = list(self._family.children)
        for child in children:
            child.break_(Failure(failure.kind, str(failure.on_rank(None))))

    def _break_locked(self, failure: Failure) -> None:
        family = self._family
        if family.failure is None:
            family.failure = failure
        for room in family.rooms:
            for meeting in room._meetings.values():
                meeting.fail(family.failure)
            room._meetings = {}

    def leave(self, rank: int, why: str, *, with_children: bool = False) -> None:
        """Record that `rank` makes no more calls on any lane. Peers that need it raise `UnevenInputs` at once."""
        family = self._family
        with self._lock:
            family.gone.setdefault(rank, why)
            for room in family.rooms:
                for meeting in list(room._meetings.values()):
                    if meeting.state is State.GATHERING and rank in meeting.absent():
                        room._check(meeting)
            children = list(family.children) if with_children else []
        for child in children:
            if rank in child._ranks_in_parent:
                child.leave(child._ranks_in_parent.index(rank), why, with_children=True)
