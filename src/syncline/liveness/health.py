"""The state of a group on this rank: whether it can still be used, why it failed, and the errors that result.

`Health` also publishes failures and this rank's place to the peers, and reads theirs.
"""

from __future__ import annotations

import ctypes
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
    """A separate sequence of a transport's collectives, whose numbers are the same on every rank.

    Args:
        name: for messages.
        group: the process group of torch that carries the lane; None if there is none.
    """

    __slots__ = ("group", "name", "num_started")

    def __init__(self, name: str, group: object) -> None:
        self.name = name
        self.group = group
        self.num_started = 0


class Waiting(Protocol):
    """An operation that is waited for, with the information that errors need."""

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return the wait to publish to the peers."""

    def elapsed_seconds(self) -> float:
        """Return the time since the call."""


class Health:
    """The state that all lanes of a group have in common on this rank.

    Args:
        main: the first lane.
        board: where this rank is.
        notices: the notices of the group; None for a group of one rank.
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
        """The lanes that were closed last, and the number of collectives started on each."""
        self.rank = rank
        self.size = size
        self.barrier_device = barrier_device
        self.notices = notices
        self.calling_thread = 0
        """The only thread that has started collectives; 0 before the first one, -1 once there were several threads."""
        self.wait: Wait | None = None
        """The call that this rank has been waiting in for a while."""
        self.num_started_by_torch: dict[str, int] = {}
        """Like `Place.num_started`, for groups of torch in which a peer waits while this rank waits."""
        self.num_waits = 0
        self.on_failure: list[Callable[[Failure], None]] = []
        """Called with each failure that this rank detects, to inform the peers in other ways than by notices."""
        self._board = board
        self.backend = backend
        self._timeout_seconds = timeout_seconds
        self._group = main.group
        if size > 1:
            refuse_in_forks(self)

    # ------------------------------------------------------------------ the end of the group

    def fail(self, failure: Failure) -> None:
        """Mark the transport as failed and publish the failure.

        If a peer has published a failure with a common text first, that failure is used instead.
        """
        if self.failure is None:
            told = failure if self.notices is None else self.notices.publish(failure)
            self.failure = told if told.is_common else failure
            for tell in self.on_failure:
                tell(self.failure)
            self._keep_groups()

    def failed(self, failure: Failure) -> SynclineError:
        """Mark the transport as failed, like `fail`, and return the error to raise on this rank."""
        self.fail(failure)
        return self.error()

    def error(self) -> SynclineError:
        """Return the error to raise on this rank after a failure.

        From the second call on, the error says that the group was broken before.
        """
        assert self.failure is not None
        error = self.failure.on_rank(self.rank)
        if self.failure.kind is not SynclineError and self._has_raised:
            error = type(error)(f"{_BROKEN}\n{error}")
        self._has_raised = True
        return error

    def refuse_a_fork(self) -> None:
        """Refuse all use in this process, a fork of a rank, without informing the peers."""
        self.failure = FORKED
        self.on_failure.clear()

    def has_lost_its_group(self) -> bool:
        """Return whether the process group was destroyed by torch.distributed.destroy_process_group."""
        return self._group is not None and not is_living(self._group)

    def leave(self) -> None:
        """Publish that this rank leaves in good order and makes no more calls."""
        if self.failure is None and self.notices is not None:
            self.notices.leave(self.place(has_left=True))

    def lane_closed(self, lane: Lane) -> None:
        """Mark a lane as closed.

        When this rank leaves, it publishes the number of calls it started there, for peers that still wait on the lane.
        """
        if lane in self.lanes:
            self.lanes.remove(lane)
            self._closed.append((lane.name, lane.num_started))

    def close(self) -> None:
        """Leave, refuse all further calls, and release the groups."""
        self.leave()
        if self.failure is None:
            self.failure = CLOSED
        self.lanes = []

    def raise_if_told(self) -> None:
        """Raise if a peer has published a failure of the transport."""
        told = None if self.notices is None else self.notices.failure()
        if told is not None:
            raise self.told(told)

    def told(self, failure: Failure) -> SynclineError:
        """Record a failure that a peer has published, and return the error to raise on this rank."""
        self._learn(failure)
        return self.error()

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._keep_groups()

    def _keep_groups(self) -> None:
        """Keep the process groups alive until no operation can be under way any more.

        The destructor of a Gloo group waits for its operations. A process that has failed could not end before they
        time out.
        """
        groups = [lane.group for lane in self.lanes if lane.group is not None]
        if not groups:
            return
        keeper = threading.Timer(self._timeout_seconds + 1, id, args=(groups,))
        keeper.daemon = True
        try:
            keeper.start()
        except (
            RuntimeError
        ):  # Python 3.12 starts no thread while it exits: keep the groups to the end of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))

    # ------------------------------------------------------------------ positions of ranks

    def called_from(self, thread: int) -> None:
        """Record that `thread` starts collectives and did not start the last one.

        Once there is a second thread, a wait in one thread no longer means that the whole rank waits.
        """
        self.calling_thread = thread if self.calling_thread == 0 else -1

    def is_live(self) -> bool:
        """Return whether there is still something to publish; once False, it stays False."""
        if self.failure is not None:
            return False
        return not self.has_lost_its_group()

    def place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """Return this rank's step, phase, wait and number of started calls, for its peers to read."""
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
        """Return where each rank was last seen, and where this rank is now."""
        told = {} if self.notices is None else self.notices.places()
        return {**told, self.rank: self.place(code=user_code(sys._getframe()))}

    # ------------------------------------------------------------------ errors

    def timed_out(self, work: Waiting) -> SynclineError:
        """Return the error for a wait that took too long although no rank is known to have failed."""
        places = self.places()
        return self._ended(work, CollectiveTimeout, self._late(work, places), _LATE, places, None)

    def broken_by(self, error: RuntimeError, work: Waiting) -> SynclineError:
        """Return our error for an error of the backend."""
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
        """Return the error for ranks whose processes have ended."""
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
        """Return the error for a closed connection, which names the peer that ended first if it can be found.

        This has to wait, because a connection closes a moment before its process counts as ended or has reported a
        failure. A survivor's connections close as well when it raises, but it reports the cause before that.
        """
        first = self.places()
        began = time.monotonic()
        # With two ranks it can only be the other one.
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
        """Return the ranks on this host whose process has ended."""
        return sorted(rank for rank, process in self._neighbours().items() if process.has_ended())

    def stopped_ranks(self) -> list[int]:
        """Return the ranks on this host whose process is stopped."""
        return sorted(rank for rank, process in self._neighbours().items() if process.is_stopped())

    def _left(self, work: Waiting, ranks: Sequence[int], places: dict[int, Place]) -> SynclineError:
        """Return the error for ranks that have left in good order."""
        what = f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} left in good order, and will not come"
        here = replace(self.place(), wait=work.as_wait())
        remedy = remedy_for_left(here, [places[rank] for rank in ranks])
        return self._ended(work, UnevenInputs, what, remedy, places, None)

    def mismatched(self, work: Waiting, calls: dict[int, Call]) -> SynclineError:
        """Return the error for ranks that met in different calls.

        Args:
            work: this rank's operation.
            calls: the call of each rank, by rank.
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
        """Return where the ranks are that have met in one call.

        Publish this rank's place, and wait a moment for the places of the others. For a rank that does not publish in
        time, return the place where it was last seen, without its wait.
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
            work: the operation that is waited for.
            places: where the ranks were seen.
            steady: the same places, with only those waits that were seen twice.
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
"""How long a rank that has detected different calls waits for the places of its peers."""

_MAX_CLOSED = 64

_GLANCE_SECONDS = 0.005

_MAX_GLANCE_SECONDS = 0.1

_NAMING_SECONDS = 0.75
"""How long to look for the cause of a closed connection if all ranks are on this host, or if there are two ranks."""

_HEARTBEAT_SECONDS = SIGN_OF_LIFE_SECONDS + 1.5
"""The same limit if ranks are on other hosts. Any rank that still runs has given a sign of life by then."""

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
    """Return a backend's message (NCCL's reason is on its second line) without torch's C++ stack below it."""
    return message.partition("\nException raised from ")[0].rstrip()


def is_of_backend(error: RuntimeError) -> bool:
    """Return whether the error's text is one by which a backend reports late or lost peers, or different calls."""
    return _meaning(str(error))[0] is not SynclineError


def _meaning(message: str) -> tuple[type[SynclineError], str, str]:
    """Return our error class, a description and a remedy for a backend's error message."""
    words = message.lower()
    if "enforce fail" in words or "mismatch" in words:
        return CollectiveMismatch, "the ranks called different operations, or sizes differ", SAME_CALLS
    if "timed out" in words or "timeout" in words:
        return CollectiveTimeout, _NOT_ALL_CAME, _LATE
    if any(sign in words for sign in _SIGNS_OF_LOSS):
        return PeerLost, "the connection to a peer is lost", _LOST
    return SynclineError, "the backend failed", "its own words, below, are all that is known"
