"""The base of the engines whose ranks are processes: the health of the group, the lanes, and how they are closed."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from threading import get_ident
from typing import Any, Self

from syncline.errors import PeerFailed
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure
from syncline.liveness.health import CLOSED, Health, Lane
from syncline.liveness.notices import Notices, publisher
from syncline.transport.base import Transport


class WatchedTransport(Transport):
    """A transport between processes. Its waits check whether the peers are still alive (see `watched_work.py`).

    Args:
        health: the health of the group. All lanes use the same object.
        own_lane: the counter of the calls on the first lane.
        rank: this rank.
        size: number of ranks.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
    """

    def __init__(
        self, health: Health, own_lane: Lane, *, rank: int, size: int, timeout_seconds: float
    ) -> None:
        super().__init__(rank=rank, size=size, timeout_seconds=timeout_seconds, board=health.board)
        self.health = health
        self.own_lane = own_lane
        self._lanes: list[WatchedTransport] = []
        """The open lanes besides the first one. All lanes use the same list."""
        self._is_closed = False

    def _check_usable(self) -> None:
        """Raise if the group has failed or the transport is closed, and record the calling thread."""
        health = self.health
        if health.failure is not None:
            raise health.error()
        if self._is_closed or health.has_lost_its_group():
            raise CLOSED.on_rank(self.rank)
        if (thread := get_ident()) != health.calling_thread:
            health.called_from(thread)

    def _copy_for(self, own_lane: Lane) -> Self:
        """Return a copy of this transport for another lane."""
        lane = copy(self)
        lane.own_lane = own_lane
        self._lanes.append(lane)
        return lane

    def abort(self, reason: str) -> None:
        self.health.fail(Failure(PeerFailed, reason, aborted_by=self.rank))

    def leave(self) -> None:
        self.health.leave()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.own_lane.name == MAIN_LANE:
            self.health.close()  # first, so that the peers know the reason when they lose the connection
            for lane in list(self._lanes):
                lane.close()
        else:
            self._lanes.remove(self)
            self.health.position.mark_lane_closed(self.own_lane)
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Release the resources of this lane. Called once, by `close`."""


def published_health(
    own_lane: Lane,
    board: Board,
    store: Any,
    *,
    rank: int,
    size: int,
    backend: str,
    timeout_seconds: float,
) -> Health:
    """Return the health of a new group, which the process publishes from now on unless the group has only one rank.

    Args:
        own_lane: the counter of the calls on the first lane.
        board: the position of this rank in the program.
        store: the store through which the ranks exchange notices.
        rank: this rank.
        size: number of ranks.
        backend: the name of the engine, for messages.
        timeout_seconds: how long an operation of the group can be under way.
    """
    notices = Notices(store, rank=rank, size=size) if size > 1 else None
    health = Health(
        own_lane,
        board,
        notices,
        rank=rank,
        size=size,
        backend=backend,
        timeout_seconds=timeout_seconds,
    )
    if notices is not None:
        publisher().add(health)
    return health
