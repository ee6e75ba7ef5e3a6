"""Whether a torch.distributed group can still be used on this rank, why not, and what the peers know of it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from syncline._torch.process_groups import is_living
from syncline.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    SynclineError,
    UnevenInputs,
)
from syncline.liveness.board import Board, Place, Wait, who_is_where
from syncline.liveness.calls import (
    ONE_RANK_EVALUATES,
    SAME_CALLS,
    Call,
    Failure,
    named_ranks,
    remedy_for_left,
)
from syncline.liveness.deadlock import absent_ranks, different_calls, left_ranks, stuck_ranks
from syncline.liveness.forks import FORKED, refuse_in_forks
from syncline.liveness.notices import SIGN_OF_LIFE_SECONDS, Notices
from syncline.liveness.processes import RankProcess
from syncline.user_code import user_code

__all__ = ["CLOSED", "Health", "Lane", "Waiting", "is_of_backend"]


class Lane:
    """One kind of talk of a transport; its collectives are numbered, the same on every rank.

    Args:
        name: for messages.
        group: the process group that carries it; None where it is none of torch's.
    """

    __slots__ = ("group", "name", "num_started")

    def __init__(self, name: str, group: object) -> None:
        self.name = name
        self.group = group
        self.num_started = 0


class Waiting(Protocol):
    """An operation that is waited for, as far as errors describe it."""

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return what peers are told of this wait."""

    def elapsed_seconds(self) -> float:
        """Return the time since the call."""


class Health:
    """What all lanes of a group share on this rank.

    Args:
        main: the first lane.
        board: where this rank is.
        notices: where ranks tell each other; None for a rank that is alone.
        rank: this rank in the group.
        size: number of ranks in the group.
        backend: the backend's name, for messages.
        timeout_seconds: how long an operation of the group can be under way.
        barrier_device: the type of device on which a barrier runs.
    """

    def __init__(
        self,
        main: Lane,
        board: Board,
        notices: Notices | None,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout_seconds: float,
        barrier_device: str,
    ) -> None:
        self.failure: Failure | None = None
        self._has_raised = False
        self.lanes = [main]
        self._closed: deque[tuple[str, int]] = deque(maxlen=_MAX_CLOSED)
        """The lanes that were closed last, and how many collectives were started on each."""
        self.rank = rank
        self.size = size
        self.barrier_device = barrier_device
        self.notices = notices
        self.calling_thread = 0
        """The thread that has started collectives; one that nobody is, once there were several."""
        self.wait: Wait | None = None
        """The call that this rank has been waiting in for a while."""
        self.num_started_by_torch: dict[str, int] = {}
        """As `Place.num_started`, of groups of torch in which a peer waits while this rank does."""
        self.num_waits = 0
        self.on_failure: list[Callable[[Failure], None]] = []
        """Called with what this rank knows first, to tell the peers in another way than by notices."""
        self._board = board
        self.backend = backend
        self._timeout_seconds = timeout_seconds
        self._group = main.group
        if size > 1:
            refuse_in_forks(self)

    # ------------------------------------------------------------------ the end of the group

    def fail(self, failure: Failure) -> None:
        """The end of the transport; the peers are told. Of what all ranks say in the same words, the first counts."""
        if self.failure is None:
            told = failure if self.notices is None else self.notices.publish(failure)
            self.failure = told if told.is_common else failure
            for tell in self.on_failure:
                tell(self.failure)
            self._keep_groups()

    def failed(self, failure: Failure) -> SynclineError:
        """As `fail`; what this rank raises."""
        self.fail(failure)
        return self.error()

    def error(self) -> SynclineError:
        """What this rank raises, now that the group is broken: of every call but the first, that it comes too late."""
        assert self.failure is not None
        error = self.failure.on_rank(self.rank)
        if self.failure.kind is not SynclineError and self._has_raised:
            error = type(error)(f"{_BROKEN}\n{error}")
        self._has_raised = True
        return error

    def refuse_a_fork(self) -> None:
        """This process is a fork of a rank: it can use nothing of it, and the peers are told nothing."""
        self.failure = FORKED
        self.on_failure.clear()

    def has_lost_its_group(self) -> bool:
        """Whether the process group was destroyed, by torch.distributed.destroy_process_group."""
        return self._group is not None and not is_living(self._group)

    def leave(self) -> None:
        """Tell the peers that this rank makes no more calls, and that nothing is wrong with that."""
        if self.failure is None and self.notices is not None:
            self.notices.leave(self.place(has_left=True))

    def lane_closed(self, lane: Lane) -> None:
        """Start nothing more on a lane. Peers that still wait there learn, once this rank leaves, how far it came."""
        if lane in self.lanes:
            self.lanes.remove(lane)
            self._closed.append((lane.name, lane.num_started))

    def close(self) -> None:
        """Nothing more is started, and the groups are let go."""
        self.leave()
        if self.failure is None:
            self.failure = CLOSED
        self.lanes = []

    def raise_if_told(self) -> None:
        """Raise if a peer has told of the end of the transport."""
        told = None if self.notices is None else self.notices.failure()
        if told is not None:
            raise self.told(told)

    def told(self, failure: Failure) -> SynclineError:
        """A peer has told of the end of the transport; what this rank raises."""
        self._learn(failure)
        return self.error()

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._keep_groups()

    def _keep_groups(self) -> None:
        """Keep the process groups until no operation can be under way any more.

        When its last user goes, a Gloo group waits for its operations: a process that has given up would not
        end before they time out.
        """
        groups = [lane.group for lane in self.lanes if lane.group is not None]
        if not groups:
            return
        keeper = threading.Timer(self._timeout_seconds + 1, id, args=(groups,))
        keeper.daemon = True
        keeper.start()

    # ------------------------------------------------------------------ who is where

    def called_from(self, thread: int) -> None:
        """Note that `thread` now starts collectives, and did not start the last one.

        Where a second thread does, a wait in one of them no longer means that the rank waits.
        """
        self.calling_thread = thread if self.calling_thread == 0 else -1

    def is_live(self) -> bool:
        """Whether there is still something to tell the peers; once not, never again."""
        if self.failure is not None:
            return False
        return not self.has_lost_its_group()

    def place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """This rank's step and phase, what it waits for, and how many calls it has started, for its peers to read."""
        return Place.of(
            self._board,
            wait=self.wait,
            num_started={
                **(dict(self._closed) if has_left else {}),
                **{lane.name: lane.num_started for lane in list(self.lanes)},
                **self.num_started_by_torch,
            },
            code=code,
            has_left=has_left,
            seen=time.time(),
        )

    def places(self) -> dict[int, Place]:
        """Where each rank was last seen, this one now."""
        told = {} if self.notices is None else self.notices.places()
        return {**told, self.rank: self.place(code=user_code(sys._getframe()))}

    # ------------------------------------------------------------------ errors

    def timed_out(self, work: Waiting) -> SynclineError:
        """The error for a wait that took too long although no rank is known to have failed."""
        places = self.places()
        return self._ended(work, CollectiveTimeout, self._late(work, places), _LATE, places, None)

    def broken_by(self, error: RuntimeError, work: Waiting) -> SynclineError:
        """The backend's error in our words."""
        kind, what, remedy = _meaning(str(error))
        if kind is PeerLost:
            return self._connection_lost(work, error)
        told = None if self.notices is None else self.notices.failure()
        if told is not None and told.kind is PeerFailed:
            return self.told(told)
        places = self.places() if kind is CollectiveTimeout else None
        if places is not None:
            what = self._late(work, places)
        return self._ended(work, kind, what, remedy, places, error)

    def lost(self, work: Waiting, ranks: Sequence[int]) -> SynclineError:
        """The processes of some ranks have ended."""
        told = None if self.notices is None else self.notices.failure()
        if told is not None:
            return self.told(told)
        places = self.places()
        killed = [rank for rank in ranks if rank not in places or not places[rank].has_left]
        if not killed:
            return self._left(work, ranks, places)
        has = "its process has" if len(killed) == 1 else "their processes have"
        return self._ended(work, PeerLost, f"{named_ranks(killed)}: {has} ended", _LOST, places, None)

    def _connection_lost(self, work: Waiting, error: RuntimeError) -> SynclineError:
        """A connection was closed; of the peers the one is looked for that has ended first.

        A survivor's connections close as well, as soon as it raises. But it reports the cause before that. And a
        connection closes a moment before its process counts as ended, or has reported anything.
        """
        first = self.places()
        began = time.monotonic()
        # With two ranks there is no doubt which one it is.
        nobody_is_elsewhere = self.size == 2 or len(self._neighbours()) == self.size - 1
        patience_seconds = _NAMING_SECONDS if nobody_is_elsewhere else _HEARTBEAT_SECONDS
        places, glance_seconds = first, _GLANCE_SECONDS
        while self.notices is not None:
            ended = self.ended_ranks()
            told = self.notices.failure()
            places = self.places()
            left = [rank for rank, place in sorted(places.items()) if place.has_left]
            if told is not None or not set(ended) <= set(left):
                return self.lost(work, ended)
            if left:
                return self._left(work, left, places)
            if time.monotonic() > began + patience_seconds:
                break
            time.sleep(glance_seconds)
            glance_seconds = min(1.5 * glance_seconds, _MAX_GLANCE_SECONDS)
        what = "the connection to a peer is lost"
        silent = [rank for rank in first if rank != self.rank and places[rank].seen == first[rank].seen]
        if self.size == 2:
            what = f"the connection to rank {1 - self.rank} is lost"
        elif silent and not nobody_is_elsewhere:
            what += f", and {named_ranks(silent)} gave no sign of life for {patience_seconds:g} s"
        return self._ended(work, PeerLost, what, _LOST, places, error)

    def _neighbours(self) -> Mapping[int, RankProcess]:
        return {} if self.notices is None else self.notices.processes_here()

    def ended_ranks(self) -> list[int]:
        """Ranks on this host whose process has ended."""
        return sorted(rank for rank, process in self._neighbours().items() if process.has_ended())

    def stopped_ranks(self) -> list[int]:
        """Ranks on this host whose process is stopped."""
        return sorted(rank for rank, process in self._neighbours().items() if process.is_stopped())

    def _left(self, work: Waiting, ranks: Sequence[int], places: dict[int, Place]) -> SynclineError:
        """Some ranks have left in good order."""
        what = f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} left in good order, and will not come"
        here = replace(self.place(), wait=work.as_wait())
        remedy = remedy_for_left(here, [places[rank] for rank in ranks])
        return self._ended(work, UnevenInputs, what, remedy, places, None)

    def mismatched(self, work: Waiting, calls: dict[int, Call]) -> SynclineError:
        """The ranks met in different calls.

        Args:
            work: this rank's.
            calls: by rank.
        """
        own = work.as_wait()
        places = self._places_in(own, calls)
        if self.failure is not None:
            return self.error()
        for rank, call in calls.items():
            place = places.get(rank, Place.of(Board()))
            places[rank] = replace(place, wait=replace(own, words=str(call)), has_left=False)
        text = "\n".join(
            ["the ranks met in different calls:", who_is_where(places, size=self.size), SAME_CALLS]
        )
        return self.failed(Failure(CollectiveMismatch, text, is_common=True))

    def _places_in(self, wait: Wait, ranks: Collection[int]) -> dict[int, Place]:
        """Where the ranks are, all of which have come to one call: they tell each other now, and wait a little for it.

        Of a rank that does not look up meanwhile, it is where it was seen last, without what it waited in.
        """
        here = replace(self.place(code=user_code(sys._getframe())), wait=wait)
        places = {self.rank: here}
        if self.notices is None:
            return places
        self.notices.post(lambda: here)
        deadline = time.monotonic() + _TELLING_SECONDS
        while True:
            places = {**self.notices.places(), self.rank: here}
            late = [rank for rank in ranks if rank not in places or not places[rank].is_in(wait)]
            told = self.notices.failure()
            if told is not None:
                self._learn(told)
            if not late or self.failure is not None or time.monotonic() > deadline:
                return {r: replace(p, wait=None, opening=None) if r in late else p for r, p in places.items()}
            time.sleep(_GLANCE_SECONDS)

    def raise_if_hopeless(self, work: Waiting, places: dict[int, Place], steady: dict[int, Place]) -> None:
        """Raise if this wait can never end.

        Args:
            work: what is waited for.
            places: where the ranks were seen.
            steady: the same, with only those waits that last.
        """
        if self.wait is None:
            return
        left = left_ranks(self.wait, places)
        if left:
            raise self._left(work, left, places)
        what, stuck = "", stuck_ranks(steady)
        if different_calls(places):
            what = "the ranks met in different calls:"
        elif stuck:
            what = "the ranks wait for each other in different calls, and none of them can ever go on:"
        if what:
            lines = [what, who_is_where(places, size=self.size), SAME_CALLS]
            if any(place.sends_buffers for place in places.values()):
                lines.append(ONE_RANK_EVALUATES)
            text = "\n".join(lines)
            raise self.failed(Failure(CollectiveMismatch, text, is_common=True, stuck_ranks=stuck))

    def _late(self, work: Waiting, places: dict[int, Place]) -> str:
        unheard = [rank for rank in range(self.size) if rank not in places]
        late = sorted([*absent_ranks(work.as_wait(), places), *unheard])
        return f"{named_ranks(late)} did not come before the deadline" if late else _NOT_ALL_CAME

    def _ended(
        self,
        work: Waiting,
        kind: type[SynclineError],
        what: str,
        remedy: str,
        places: dict[int, Place] | None,
        error: Exception | None,
    ) -> SynclineError:
        where = f"rank {self.rank} of {self.size} over {self.backend}"
        lines = [f"{work} on {where}: {what}, {work.elapsed_seconds():.1f} s after the call"]
        if places is not None:
            lines.append(who_is_where(places, size=self.size, here=self.rank, now=time.time()))
        lines.append(remedy)
        if error is not None:
            lines.append(f"{self.backend} said: {_without_cpp_frames(str(error))}")
        return self.failed(Failure(kind, "\n".join(lines)))


CLOSED = Failure(
    SynclineError,
    "this transport was closed, by shutdown(), by its own close(), or because its process group was destroyed: "
    "nothing can be sent any more. Wrap the module again after the next init(), or shut down later",
)

_TELLING_SECONDS = 1.0
"""How long who has found that calls differ waits for the peers to find it as well."""

_MAX_CLOSED = 64

_GLANCE_SECONDS = 0.005

_MAX_GLANCE_SECONDS = 0.1

_NAMING_SECONDS = 0.75
"""How long a closed connection is asked for its cause on one host."""

_HEARTBEAT_SECONDS = SIGN_OF_LIFE_SECONDS + 1.5
"""The same where ranks live on other hosts: any rank that is there has given a sign of life by then."""

_BROKEN = (
    "this group was broken before, and nothing more can be synchronized over it. To go on, make it anew on all ranks "
    "(sl.shutdown() and sl.init(), or destroy the process group and create it again). What broke it:"
)

_NOT_ALL_CAME = "not every rank came before the deadline"

_LATE = (
    "look at what the ranks do that do not wait here (an endless loop, fewer batches, another call); "
    "if they are only slow, raise the timeout"
)

_LOST = (
    "a peer's process has ended, or its network failed: look at the log of the rank that ended first, "
    "its last lines say why"
)

_SIGNS_OF_LOSS = ("connect", "broken pipe", "socket", "peer", "pair closure")


def _without_cpp_frames(message: str) -> str:
    """A backend's words (NCCL's reason is on the second line), without torch's own C++ stack below them."""
    return message.partition("\nException raised from ")[0].rstrip()


def is_of_backend(error: RuntimeError) -> bool:
    """Whether the text is one of those by which a backend says that peers did not come, or are gone."""
    return _meaning(str(error))[0] is not SynclineError


def _meaning(message: str) -> tuple[type[SynclineError], str, str]:
    """What a backend's error message stands for: our error, what happened, what to do."""
    words = message.lower()
    if "enforce fail" in words or "mismatch" in words:
        return CollectiveMismatch, "the ranks called different operations, or sizes differ", SAME_CALLS
    if "timed out" in words or "timeout" in words:
        return CollectiveTimeout, _NOT_ALL_CAME, _LATE
    if any(sign in words for sign in _SIGNS_OF_LOSS):
        return PeerLost, "the connection to a peer is lost", _LOST
    return SynclineError, "the backend failed", "its own words, below, are all that is known"
