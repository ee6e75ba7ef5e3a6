"""The base class of the engines whose ranks are processes. It manages the health of the group and its lanes."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from threading import get_ident
from typing import Self

from syncline.errors import PeerFailed
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure
from syncline.liveness.health import CLOSED, Health, Lane
from syncline.liveness.notices import Notices
from syncline.transport.base import Transport


class WatchedTransport(Transport):
    """The base class of transports between processes. Their waits check for failed peers (see `watched_work.py`).

    Args:
        health: the object that records failures of the group. All lanes use the same object.
        own_lane: the name of the first lane, and the counter of its calls.
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
        """The open lanes other than the first one. All lanes of the group have the same list object."""
        self._is_closed = False

    def _check_usable(self) -> None:
        """Raise an error if the group has failed or the transport is closed. If neither, record the calling thread."""
        health = self.health
        if health.failure is not None:
            raise health.error()
        if self._is_closed or health.has_lost_its_group():
            raise CLOSED.on_rank(self.rank)
        if (thread := get_ident()) != health.calling_thread:
            health.called_from(thread)

    def _copy_for(self, own_lane: Lane) -> Self:
        """Return a copy of this transport that represents another lane."""
        lane = copy(self)
        lane.own_lane = own_lane
        self._lanes.append(lane)
        return lane

    def abort(self, reason: str, *, traceback: str = "") -> None:
        self.health.fail(Failure(PeerFailed, reason, aborted_by=self.rank, traceback=traceback))

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

    def drop_groups(self) -> None:
        """Release the process groups that are kept after a failure. Call it after `close`, if the process goes on."""
        self.health.drop_groups()

    @abstractmethod
    def _release(self) -> None:
        """Release the resources of this lane. `close` calls this method once."""


def health_of_group(
    own_lane: Lane,
    board: Board,
    *,
    rank: int,
    size: int,
    backend: str,
    timeout_seconds: float,
) -> Health:
    """Create the `Health` of a new group. Once it has a medium (`Health.exchange_notices`), ranks exchange notices.

    Args:
        own_lane: the name of the first lane, and the counter of its calls.
        board: the object that records where in the program this rank is.
        rank: this rank.
        size: number of ranks.
        backend: the name of the engine in messages.
        timeout_seconds: the longest time that an operation of the group can be under way.
    """
    notices = Notices(rank=rank, size=size) if size > 1 else None
    return Health(
        own_lane,
        board,
        notices,
        rank=rank,
        size=size,
        backend=backend,
        timeout_seconds=timeout_seconds,
    )
