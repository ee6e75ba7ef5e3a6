"""The state of a group on this rank: whether the group can still be used, why it failed, and the places of its ranks.

`Health` also publishes the failures and the place of this rank, and reads those of the peers. When a wait fails,
`failed_wait.py` finds the cause.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from syncline._torch.process_groups import is_living
from syncline.errors import SynclineError
from syncline.liveness.at_exit import AT_EXIT, Keeper, keep_for_ever
from syncline.liveness.board import Board, Place, Wait
from syncline.liveness.calls import Failure, num_started
from syncline.liveness.notices import Medium, Notices, publisher
from syncline.liveness.processes import FORKED, RankProcess, clock_key, refuse_in_forks
from syncline.user_code import user_code


@dataclass(slots=True, eq=False)
class Lane:
    """A sequence of collectives of a transport, in the same order on every rank. A transport can have several lanes."""

    name: str
    """The name of the lane. Messages show it."""
    group: object
    """torch's process group that runs the collectives of the lane; None if the lane has no process group."""
    barrier_device: str = "cpu"
    """The type of the device on which the barriers of the lane run."""
    num_started: int = 0
    """The number of collectives that this rank has started on the lane."""

    def __post_init__(self) -> None:
        if self.group is not None:
            AT_EXIT.keep(self.group)


class Waiting(Protocol):
    """An operation for which this rank waits. Its methods return the information that errors show."""

    @property
    def timeout_seconds(self) -> float:
        """The longest time for which an operation of the group can be pending."""

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return this operation as a wait, for the peers to read."""

    def elapsed_seconds(self) -> float:
        """Return the time since the operation was started."""


class Position:
    """The position of this rank in one group: the board, the current long wait, and the number of started calls.

    Args:
        board: the step, phase and bucket of this rank.
        lanes: the open lanes of the group. The object keeps no copy of this list, because the transports change it.
    """

    def __init__(self, board: Board, lanes: list[Lane]) -> None:
        self.wait: Wait | None = None
        """The call in which this rank has been waiting for a while; None if there is no such call."""
        self._board = board
        self._lanes = lanes
        self._closed: deque[tuple[str, int]] = deque(maxlen=_MAX_CLOSED)
        """The names of the lanes that were closed last, each with the number of collectives started on the lane."""
        self._num_started_by_torch: dict[str, int] = {}
        """The number of calls that this rank has started on each of torch's groups in which a peer waits, by lane."""

    def begin_wait(self, work: Waiting, *, blocks_rank: bool) -> None:
        """Record that this rank has been waiting for `work` for a while."""
        self.wait = work.as_wait(number=time.monotonic_ns(), blocks_rank=blocks_rank)

    def end_wait(self) -> None:
        """Record that the long wait of this rank is over."""
        self.wait = None
        self._num_started_by_torch = {}

    def count_calls_of_torch(self, lanes: set[str]) -> None:
        """Record how many calls this rank has started on the process groups of torch with these names.

        Peers wait in calls on these groups.
        """
        self._num_started_by_torch = num_started(lanes)

    def mark_lane_closed(self, lane: Lane) -> None:
        """Mark a lane as closed, and remember how many calls this rank has started on it.

        When this rank shuts down, it publishes this number for the peers that still wait on the lane.
        """
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._closed.append((lane.name, lane.num_started))

    def as_place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """Return a snapshot of this position, for the peers to read."""
        return replace(
            Place.of(self._board, wait=self.wait, code=code, has_left=has_left),
            num_started={
                **(dict(self._closed) if has_left else {}),
                **{lane.name: lane.num_started for lane in list(self._lanes)},
                **self._num_started_by_torch,
            },
            seen=time.monotonic(),
            clock=clock_key(),
        )


class Health:
    """The state of a group on this rank, which all lanes of the group use.

    Args:
        main: the first lane.
        board: the step, phase and bucket of this rank.
        rank: this rank in the group.
        size: the number of ranks in the group.
        backend: the name of the backend. Messages show it.
        timeout_seconds: the longest time for which an operation of the group can be pending.
    """

    def __init__(
        self,
        main: Lane,
        board: Board,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout_seconds: float,
    ) -> None:
        self.failure: Failure | None = None
        self.on_failure: list[Callable[[Failure], None]] = []
        """Functions that are called with a failure of the group. They inform the peers by other means than notices."""
        self.lanes = [main]
        self.board = board
        self.position = Position(board, self.lanes)
        self.rank = rank
        self.size = size
        self.notices = Notices(rank=rank, size=size)
        self.backend = backend
        self.calling_thread = 0
        """The id of the only thread that has started collectives; 0 if no thread has, -1 if several threads have."""
        self._has_raised = False
        self._timeout_seconds = timeout_seconds
        self._group = None if main.group is None else weakref.ref(main.group)
        self._keeper: Keeper | None = None
        """The thread that keeps the groups alive after a failure."""
        self._reports: dict[int, tuple[float, float]] = {}
        """The `seen` of the last report of each rank, and when this rank read it for the first time."""
        self._ranks_that_left: set[int] = set()
        """The ended ranks that had left the group before, as `killed_ranks` has found."""
        self._killed_at: dict[int, float] = {}
        """The time at which `killed_ranks` first found that a rank had been killed, by rank."""
        if size > 1:
            refuse_in_forks(self)

    # ------------------------------------------------------------------ the end of the group

    def fail(self, failure: Failure) -> None:
        """Mark the process group as failed, and publish the failure. Do nothing if the group has failed before.

        If a peer has already published a failure whose text is common to all ranks, record that failure instead.
        """
        if self.failure is None:
            self.failure = (
                failure  # first, because a published failure may end the waits of this rank's other threads
            )
            first = self.notices.publish(failure)
            if first.is_common:
                self.failure = first
            for inform_peers in self.on_failure:
                inform_peers(self.failure)
            self._keep_groups()

    def failed(self, failure: Failure) -> SynclineError:
        """Mark the process group as failed by calling `fail`, and return the error to raise on this rank."""
        self.fail(failure)
        return self.error()

    def error(self) -> SynclineError:
        """Return the error to raise on this rank after a failure.

        From the second call on, the text of the error begins with the statement that the group failed before. An error
        of the class `SynclineError` itself, and not of a subclass, lacks this statement.
        """
        assert self.failure is not None
        error = self.failure.on_rank(self.rank)
        if self.failure.kind is not SynclineError and self._has_raised:
            error.args = (f"{_BROKEN}\n{error}",)
        self._has_raised = True
        return error

    def refuse_a_fork(self) -> None:
        """Make every later call raise an error, because this process is a fork of a rank. Do not inform the peers."""
        self.failure = FORKED
        self.on_failure.clear()

    def has_lost_its_group(self) -> bool:
        """Return whether the program has destroyed the process group by torch.distributed.destroy_process_group."""
        if self._group is None:
            return False
        group = self._group()
        return group is None or not is_living(group)

    def is_live(self) -> bool:
        """Return whether the place of this rank is still to be published. Once the result is False, it stays False."""
        return self.failure is None and not self.has_lost_its_group()

    def exchange_notices(self, medium: Medium, processes: Mapping[int, RankProcess] | None = None) -> None:
        """Exchange notices with the peers by a medium from now on, and publish the place of this rank by it.

        The group has several ranks. For the arguments, see `Notices.use`.
        """
        self.notices.use(medium, processes)
        publisher().add(self)

    def leave(self) -> None:
        """Publish that this rank shuts down normally and will make no more calls."""
        if self.failure is None:
            self.notices.leave(self.place(has_left=True))

    def close(self) -> None:
        """Publish the end of this rank by calling `leave`, refuse all further calls, and release the groups."""
        self.leave()
        if self.failure is None:
            self.failure = CLOSED
        self.lanes.clear()

    def raise_if_published(self) -> None:
        """Raise an error if a rank of the group has published a failure."""
        published = self.notices.failure()
        if published is not None:
            raise self.adopted(published)

    def adopted(self, failure: Failure) -> SynclineError:
        """Record a failure that a peer has published, unless there is one. Return the error to raise on this rank."""
        if self.failure is None:
            self.failure = failure
            self._keep_groups()
        return self.error()

    def _keep_groups(self) -> None:
        """Keep the process groups alive until all pending operations must have ended.

        The destructor of a Gloo group waits for pending operations. So if the groups were released after a failure,
        this process would block until these operations time out.
        """
        groups = [lane.group for lane in self.lanes if lane.group is not None]
        if not groups:
            return
        try:
            self._keeper = Keeper(groups, self._timeout_seconds + 1)
        except RuntimeError:  # Python 3.12 starts no thread while it exits, so keep the groups until the end
            keep_for_ever(groups)

    def drop_groups(self) -> None:
        """Drop the groups that are kept after a failure. A thread waits for their pending operations meanwhile.

        A process that continues without them calls this, so that their connections, threads and memory are released.
        """
        if self._keeper is not None:
            self._keeper.drop()
            self._keeper = None

    # ------------------------------------------------------------------ the ranks

    def called_from(self, thread: int) -> None:
        """Record that a thread starts a collective. The caller checks that `calling_thread` is not this thread.

        Once two threads have started collectives, a wait in one thread no longer means that the whole rank waits.

        Args:
            thread: the id of the thread.
        """
        self.calling_thread = thread if self.calling_thread == 0 else -1

    def runs_over(self, backend: str) -> None:
        """Set the name of the backend, which messages show."""
        self.backend = backend

    def place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """Return a snapshot of this rank's position in the group, for the peers to read."""
        return self.position.as_place(code=code, has_left=has_left)

    def places(self) -> dict[int, Place]:
        """Return the last published place of each rank, and this rank's current place."""
        published = self.notices.places()
        now = time.monotonic()
        for rank, place in published.items():
            if self._reports.get(rank, (None,))[0] != place.seen:
                self._reports[rank] = place.seen, now
        return {**published, self.rank: self.place(code=user_code(sys._getframe()))}

    def ages(self, places: Mapping[int, Place]) -> dict[int, str]:
        """Return how old the places of the other ranks are, by rank, in words.

        An age is the difference between two times of one clock. A rank on another host has another clock, so its age is
        the time since this rank read its report.
        """
        now, own, found = time.monotonic(), clock_key(), {}
        for rank, place in places.items():
            if place.clock == own:
                found[rank] = f"{max(0.0, now - place.seen):.1f} s ago"
            else:
                _, read_at = self._reports.get(rank, (place.seen, now))
                found[rank] = f"which this rank read {now - read_at:.1f} s ago"
        found.pop(self.rank, None)
        return found

    def are_all_here(self) -> bool:
        """Return whether the processes of all other ranks are known to be on this host."""
        return len(self.notices.processes_here()) == self.size - 1

    def ended_ranks(self) -> list[int]:
        """Return the other ranks on this host whose processes have ended."""
        return sorted(rank for rank, process in self.notices.processes_here().items() if process.has_ended())

    def killed_ranks(self) -> dict[int, float]:
        """Return the other ranks on this host whose processes have ended without leaving the group.

        The store is read only if a process has ended.

        Returns:
            For each of these ranks, the number of seconds since this method first found it.
        """
        known = self.notices.known_processes_here()
        ended = [
            rank
            for rank, process in known.items()
            if rank not in self._ranks_that_left and process.has_ended()
        ]
        if ended:
            places = self.places()
            self._ranks_that_left.update(rank for rank in ended if rank in places and places[rank].has_left)
        now = time.monotonic()
        return {
            rank: now - self._killed_at.setdefault(rank, now)
            for rank in ended
            if rank not in self._ranks_that_left
        }

    def stopped_ranks(self) -> list[int]:
        """Return the other ranks on this host whose processes are stopped by SIGSTOP, Ctrl-Z or a debugger."""
        return sorted(rank for rank, process in self.notices.processes_here().items() if process.is_stopped())


CLOSED = Failure(
    SynclineError,
    "this transport was closed (by sl.shutdown(), by its method close(), or because its process group was destroyed), "
    "so nothing can be sent over it. Call sl.shutdown() later, or create the wrapper again after the next sl.init()",
)

_MAX_CLOSED = 64

_BROKEN = (
    "this process group failed before, so nothing can be synchronized over it. To continue, create the group again on "
    "all ranks: call sl.shutdown() and sl.init(), or destroy the group and create a new one. The first failure:"
)
