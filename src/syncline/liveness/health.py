"""The state of a group on this rank: whether the group can still be used, why it failed, and where its ranks are.

`Health` also publishes failures and this rank's place to the peers, and reads theirs. `failed_wait.py` finds the cause
when a wait fails.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from syncline._torch.process_groups import is_living
from syncline.errors import SynclineError
from syncline.liveness.board import Board, Place, Wait
from syncline.liveness.calls import Failure, num_started
from syncline.liveness.notices import Notices
from syncline.liveness.processes import FORKED, RankProcess, refuse_in_forks
from syncline.user_code import user_code


@dataclass(slots=True, eq=False)
class Lane:
    """A separate sequence of a transport's collectives, which are numbered in the same way on every rank."""

    name: str
    """The name of the lane, for messages."""
    group: object
    """The process group of torch that carries the lane; None if there is none."""
    barrier_device: str = "cpu"
    """The type of device on which a barrier of the lane runs."""
    num_started: int = 0
    """Number of collectives that this rank has started on the lane."""


class Waiting(Protocol):
    """An operation that is waited for, with the information that errors need."""

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return the wait to publish to the peers."""

    def elapsed_seconds(self) -> float:
        """Return the time since the call."""


class Position:
    """The position of this rank in one group: the board, the long wait, and the number of started calls.

    Args:
        board: the step, phase and bucket of this rank.
        lanes: the open lanes of the group. The transports append to this list.
    """

    def __init__(self, board: Board, lanes: list[Lane]) -> None:
        self.wait: Wait | None = None
        """The call that this rank has been waiting in for a while."""
        self._board = board
        self._lanes = lanes
        self._closed: deque[tuple[str, int]] = deque(maxlen=_MAX_CLOSED)
        """The lanes that were closed last, and the number of collectives started on each."""
        self._num_started_by_torch: dict[str, int] = {}
        """Like `Place.num_started`, for groups of torch in which a peer waits while this rank waits."""

    def begin_wait(self, work: Waiting, *, blocks_rank: bool) -> None:
        """Record that this rank has been waiting in a call for a while."""
        self.wait = work.as_wait(number=time.monotonic_ns(), blocks_rank=blocks_rank)

    def end_wait(self) -> None:
        """Record that the wait is over."""
        self.wait = None
        self._num_started_by_torch = {}

    def count_calls_of_torch(self, lanes: set[str]) -> None:
        """Count the calls that this rank has started on groups of torch, in which peers wait while this rank waits."""
        self._num_started_by_torch = num_started(lanes)

    def mark_lane_closed(self, lane: Lane) -> None:
        """Mark a lane as closed.

        When this rank shuts down, it publishes the number of calls that it started on the lane, for peers that still
        wait on the lane.
        """
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._closed.append((lane.name, lane.num_started))

    def as_place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """Return a snapshot of this position for the peers."""
        return replace(
            Place.of(self._board, wait=self.wait, code=code, has_left=has_left),
            num_started={
                **(dict(self._closed) if has_left else {}),
                **{lane.name: lane.num_started for lane in list(self._lanes)},
                **self._num_started_by_torch,
            },
            seen=time.time(),
        )


class Health:
    """The state that all lanes of a group have in common on this rank.

    Args:
        main: the first lane.
        board: the step, phase and bucket of this rank.
        notices: the notices of the group; None for a group of one rank.
        rank: this rank in the group.
        size: number of ranks in the group.
        backend: the backend's name, for messages.
        timeout_seconds: how long an operation of the group can be under way.
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
    ) -> None:
        self.failure: Failure | None = None
        self.on_failure: list[Callable[[Failure], None]] = []
        """Called with each failure that this rank detects, to inform the peers in other ways than by notices."""
        self.lanes = [main]
        self.board = board
        self.position = Position(board, self.lanes)
        self.rank = rank
        self.size = size
        self.notices = notices
        self.backend = backend
        self.calling_thread = 0
        """The only thread that has started collectives; 0 before the first one, -1 once there were several threads."""
        self._has_raised = False
        self._timeout_seconds = timeout_seconds
        self._group = main.group
        if size > 1:
            refuse_in_forks(self)

    # ------------------------------------------------------------------ the end of the group

    def fail(self, failure: Failure) -> None:
        """Mark the process group as failed and publish the failure.

        If a peer has published a failure with a common text first, that failure is used instead.
        """
        if self.failure is None:
            first = failure if self.notices is None else self.notices.publish(failure)
            self.failure = first if first.is_common else failure
            for inform_peers in self.on_failure:
                inform_peers(self.failure)
            self._keep_groups()

    def failed(self, failure: Failure) -> SynclineError:
        """Mark the process group as failed, like `fail`, and return the error to raise on this rank."""
        self.fail(failure)
        return self.error()

    def error(self) -> SynclineError:
        """Return the error to raise on this rank after a failure.

        From the second call on, the text says that the group failed before.
        """
        assert self.failure is not None
        error = self.failure.on_rank(self.rank)
        if self.failure.kind is not SynclineError and self._has_raised:
            error = type(error)(f"{_BROKEN}\n{error}")
        self._has_raised = True
        return error

    def refuse_a_fork(self) -> None:
        """Let every later call fail, because this process is a fork of a rank. Do not inform the peers."""
        self.failure = FORKED
        self.on_failure.clear()

    def has_lost_its_group(self) -> bool:
        """Return whether torch.distributed.destroy_process_group has destroyed the process group."""
        return self._group is not None and not is_living(self._group)

    def is_live(self) -> bool:
        """Return whether this rank still publishes its place. Once the result is False, it stays False."""
        return self.failure is None and not self.has_lost_its_group()

    def leave(self) -> None:
        """Publish that this rank shuts down normally and makes no more calls."""
        if self.failure is None and self.notices is not None:
            self.notices.leave(self.place(has_left=True))

    def close(self) -> None:
        """Leave the other ranks, refuse all further calls, and release the groups."""
        self.leave()
        if self.failure is None:
            self.failure = CLOSED
        self.lanes.clear()

    def published_failure(self) -> Failure | None:
        """Return the failure of the group that a rank has published; None if there is none."""
        return None if self.notices is None else self.notices.failure()

    def raise_if_published(self) -> None:
        """Raise if a rank has published a failure of the group."""
        published = self.published_failure()
        if published is not None:
            raise self.adopted(published)

    def adopted(self, failure: Failure) -> SynclineError:
        """Record a failure that a peer has published, and return the error to raise on this rank."""
        self.adopt(failure)
        return self.error()

    def adopt(self, failure: Failure) -> None:
        """Record a failure that a peer has published."""
        if self.failure is None:
            self.failure = failure
            self._keep_groups()

    def _keep_groups(self) -> None:
        """Keep the process groups alive until no operation can be under way any more.

        The destructor of a Gloo group waits for pending operations. After a failure, a process could therefore not end
        before these operations time out.
        """
        groups = [lane.group for lane in self.lanes if lane.group is not None]
        if not groups:
            return
        keeper = threading.Timer(self._timeout_seconds + 1, id, args=(groups,))
        keeper.daemon = True
        try:
            keeper.start()
        except RuntimeError:  # Python 3.12 starts no thread while it exits, so keep the groups until the end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))

    # ------------------------------------------------------------------ the ranks

    def called_from(self, thread: int) -> None:
        """Record that `thread` starts collectives and did not start the last one.

        Once there is a second thread, a wait in one thread no longer means that the whole rank waits.
        """
        self.calling_thread = thread if self.calling_thread == 0 else -1

    def runs_over(self, backend: str) -> None:
        """Set the name of the backend in messages."""
        self.backend = backend

    def place(self, *, code: str | None = None, has_left: bool = False) -> Place:
        """Return this rank's step, phase, wait and number of started calls, for its peers to read."""
        return self.position.as_place(code=code, has_left=has_left)

    def places(self) -> dict[int, Place]:
        """Return the last published place of each rank, and this rank's current place."""
        published = {} if self.notices is None else self.notices.places()
        return {**published, self.rank: self.place(code=user_code(sys._getframe()))}

    def processes_here(self) -> Mapping[int, RankProcess]:
        """Return the processes of the other ranks on this host, by rank."""
        return {} if self.notices is None else self.notices.processes_here()

    def ended_ranks(self) -> list[int]:
        """Return the ranks on this host whose process has ended."""
        return sorted(rank for rank, process in self.processes_here().items() if process.has_ended())

    def stopped_ranks(self) -> list[int]:
        """Return the ranks on this host whose process is stopped by SIGSTOP, Ctrl-Z or a debugger."""
        return sorted(rank for rank, process in self.processes_here().items() if process.is_stopped())


CLOSED = Failure(
    SynclineError,
    "this transport was closed (by sl.shutdown(), by its method close(), or because its process group was destroyed), "
    "so nothing can be sent over it. Call sl.shutdown() later, or create the wrapper again after the next sl.init()",
)

_MAX_CLOSED = 64

_BROKEN = (
    "this process group failed before, so nothing can be synchronized over it. To continue, create it again on all "
    "ranks (sl.shutdown() and sl.init(), or destroy the process group and create a new one). The first failure:"
)
