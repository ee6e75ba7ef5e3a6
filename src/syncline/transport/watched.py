"""The base classes of the engines whose ranks are processes: of transports, and of works.

`WatchedTransport` manages the health of the group and its lanes.

`WatchedWork` waits in short slices of time. Each engine implements the wait for one slice (`_ends_within`). Some
operations do not advance by themselves (see `phases.py`). While such operations are under way, every wait advances
them.

If a wait lasts longer than one slice, `LongWait` publishes to the peers where this rank waits, and reads where the
peers are. Short waits are not published, so that a healthy step is not slowed down.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from abc import abstractmethod
from copy import copy
from types import TracebackType
from typing import ClassVar, Protocol, Self

from torch import Tensor

from syncline.environment import patience
from syncline.errors import PeerFailed, SynclineError
from syncline.liveness.board import MAIN_LANE, Place, Wait
from syncline.liveness.calls import Call, Failure
from syncline.liveness.deadlock import steady
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import CLOSED, Health, Lane
from syncline.liveness.notices import SIGN_OF_LIFE_SECONDS
from syncline.transport.base import Transport
from syncline.transport.work import Work
from syncline.user_code import user_code, warn_user

SLICE_SECONDS = 0.25
"""How long a wait lasts before it checks for failures, and the time between two checks."""

MESSAGES = ("send", "recv")
"""The operations that only two ranks call. They are not numbered, because the other ranks do not count them."""

_DRIVE_SECONDS = 0.002
"""How long a wait blocks before it advances other operations again."""


class WatchedTransport(Transport):
    """The base class of transports between processes. Their waits check for failed peers.

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
        if (thread := threading.get_ident()) != health.calling_thread:
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

    @abstractmethod
    def _release(self) -> None:
        """Release the resources of this lane. `close` calls this method once."""


# ---------------------------------------------------------------------- works


class Driven(Protocol):
    """The interface of a set of operations that advance only when `drive` is called."""

    def drive(self) -> None:
        """Advance all operations as far as is possible without waiting. This method never raises."""

    def is_idle(self, except_for: object) -> bool:
        """Return whether no operation other than `except_for` is under way."""


class UnderWay:
    """The registry of all operations of this process that advance only when `drive` is called."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """The lock that a thread holds while it drives the operations."""
        self._all: dict[int, Driven] = {}

    def add(self, operations: Driven) -> None:
        """Register `operations`, so that `drive` advances them from now on."""
        self._all[id(operations)] = operations

    def remove(self, operations: Driven) -> None:
        """Unregister `operations`, so that `drive` no longer advances them."""
        self._all.pop(id(operations), None)

    def drive(self) -> None:
        """Advance all registered operations as far as is possible without waiting.

        If another thread is doing this already, return at once.
        """
        if self._all and self.lock.acquire(blocking=False):
            try:
                for operations in list(self._all.values()):
                    operations.drive()
            finally:
                self.lock.release()

    def is_idle(self, except_for: object) -> bool:
        """Return whether no registered operation other than `except_for` is under way."""
        return not self._all or all(operations.is_idle(except_for) for operations in list(self._all.values()))


under_way = UnderWay()


class WatchedWork(Work):
    """The base class of works between processes. A work describes its call, for errors and for the peers.

    The constructor is the same for all engines, and its arguments describe the call. Each subclass has another method,
    `start` or `enter`, which sets the operation itself.

    Args:
        transport: the transport whose method was called.
        operation: the name of the operation, for messages.
        detail: the reduce operation or the peer, for messages. It is "" if the operation has neither.
        tensor: the tensor that the caller passed in. Pass None for a barrier.
    """

    __slots__ = (
        "_detail",
        "_health",
        "_lane",
        "_number",
        "_operation",
        "_started",
        "_tensor",
        "timeout_seconds",
    )

    runs_by_itself: ClassVar[bool] = False
    """Whether the operation advances even while no thread of this rank waits for it or polls it."""

    def __init__(
        self, transport: WatchedTransport, operation: str, detail: str, tensor: Tensor | None
    ) -> None:
        self._health = transport.health
        self._lane = lane = transport.own_lane
        self.timeout_seconds = transport.timeout_seconds  # of waits without a timeout of their own
        self._operation = operation
        self._detail = detail
        self._tensor = tensor
        self._number = None if operation in MESSAGES else lane.num_started
        self._started = time.monotonic()

    def elapsed_seconds(self) -> float:
        """Return the time since the operation was called."""
        return time.monotonic() - self._started

    def describe_as(self, whole: WatchedWork) -> None:
        """Let messages describe this operation by the call of `whole`, the larger operation that contains it."""
        self._operation, self._detail, self._tensor = whole._operation, whole._detail, whole._tensor
        self._lane, self._number, self._started = whole._lane, whole._number, whole._started

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return a description of the wait for this operation, to be published to the peers.

        Args:
            number: a number that identifies this wait on this rank.
            blocks_rank: whether no other thread of this rank has ever started a collective.
        """
        tensor = self._tensor
        numel, dtype = (None, None) if tensor is None else (tensor.numel(), tensor.dtype)
        words = str(Call(self._operation, self._detail, numel, dtype))
        return Wait(
            lane=self._lane.name, call=self._number, words=words, number=number, blocks_rank=blocks_rank
        )

    def __str__(self) -> str:
        return str(self.as_wait())

    @abstractmethod
    def _has_succeeded(self) -> bool:
        """Return whether the operation is done, although the group has failed. This method never raises."""

    @abstractmethod
    def _ends_within(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether the operation is done.

        If the operation has failed, raise its error.
        """

    def _wait_in_slices(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        if self._ends_driving(min(timeout_seconds, SLICE_SECONDS)):
            return
        with LongWait(self._health, self) as long_wait:
            while True:
                remaining_seconds = deadline - time.monotonic()
                if remaining_seconds <= 0:
                    raise FailedWait(self._health, self).timed_out(timeout_seconds)
                try:
                    long_wait.check()
                except SynclineError:
                    if self._has_succeeded():  # the group failed after this operation
                        return
                    raise
                if self._ends_driving(min(remaining_seconds, SLICE_SECONDS)):
                    return

    def _ends_driving(self, seconds: float) -> bool:
        """Wait as `_ends_within` does, and advance the registered operations (see `UnderWay`) meanwhile."""
        if under_way.is_idle(except_for=self):
            return self._ends_within(seconds)
        deadline = time.monotonic() + seconds
        while True:
            under_way.drive()
            remaining_seconds = deadline - time.monotonic()
            if self._ends_within(min(remaining_seconds, _DRIVE_SECONDS)):
                return True
            if remaining_seconds <= _DRIVE_SECONDS:
                return False


_LOOK_SECONDS = 0.5
"""The period in which a waiting rank reads where the other ranks are, in a group of few ranks."""

_MANY_RANKS = 16
"""The number of ranks above which ranks look more rarely, because a look at n ranks costs n times as much."""

_NUM_LOOKOUTS = 4
"""How many of more than `_MANY_RANKS` ranks look often."""

_RARELY = 8
"""How many times more rarely the others look."""


def look_period_seconds(rank: int, size: int) -> float:
    """Return the period in which a waiting rank reads where the other ranks of its group are.

    With many ranks, a few look often and the others rarely. A finding is published, so it is enough if one rank finds
    it. If all ranks looked often, the places that they read would fill a slow link to the host with the store.

    Examples:
        >>> look_period_seconds(1, 4), look_period_seconds(0, 64), look_period_seconds(1, 64)
        (0.5, 2.0, 16.0)
    """
    if size <= _MANY_RANKS:
        return _LOOK_SECONDS
    is_lookout = rank % math.ceil(size / _NUM_LOOKOUTS) == 0
    return _LOOK_SECONDS * size / _MANY_RANKS * (1 if is_lookout else _RARELY)


_SILENCE_SECONDS = SIGN_OF_LIFE_SECONDS + patience(5.0)
"""How long a rank must have published nothing before its peers warn about it."""

_STOPPED = "whose process is stopped (by SIGSTOP, Ctrl-Z or a debugger)"

_SILENT = (
    f"which has published nothing for {_SILENCE_SECONDS:g} s (its process is stopped, or cannot be reached)"
)


class LongWait:
    """A context manager for a wait that lasts longer than one slice. Inside it, the wait is published to the peers.

    Args:
        health: the `Health` of the transport's group.
        work: the work for which this rank waits.
    """

    def __init__(self, health: Health, work: WatchedWork) -> None:
        self._health = health
        self._work = work
        self._period_seconds = look_period_seconds(health.rank, health.size)
        self._next_look = time.monotonic() + self._period_seconds / 2  # half of the period has passed already
        self._seen: dict[int, Place] = {}
        self._signs_of_life: dict[int, tuple[float, float]] = {}
        """A map from another rank to two times: when it last published its place, and when this rank first read that.

        The first time is by the clock of the other rank. The second time is by the clock of this rank.
        """
        self._warned_of: set[int] = set()

    def __enter__(self) -> LongWait:
        is_only_thread = self._health.calling_thread == threading.get_ident()
        self._health.position.begin_wait(self._work, blocks_rank=is_only_thread)
        self._post()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._health.position.end_wait()
        if error is None:
            self._post()

    def check(self) -> None:
        """Raise an error if the group has failed or this wait can never end. Warn of stopped and silent ranks."""
        health = self._health
        health.raise_if_published()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._period_seconds
        seen = self._look()
        ended = [rank for rank in health.ended_ranks() if rank not in seen or not seen[rank].has_left]
        if ended and not self._work.is_completed():
            raise FailedWait(health, self._work).lost(ended)
        FailedWait(health, self._work).raise_if_endless(seen, steady(self._seen, seen))
        self._seen = seen
        halted = dict.fromkeys(self._silent_ranks(now), _SILENT)
        halted |= dict.fromkeys(health.stopped_ranks(), _STOPPED)
        for rank in sorted(halted.keys() - self._warned_of):
            self._warn_of(rank, halted[rank])
        self._warned_of = set(halted)

    def _look(self) -> dict[int, Place]:
        """Return the place in the program of each rank that has published one.

        If some ranks wait in calls of torch.distributed on a process group, this rank also publishes how many calls it
        has started on that group.
        """
        health = self._health
        seen = health.places()
        waits = (place.wait for place in seen.values() if place.wait is not None)
        if lanes := {wait.lane for wait in waits if wait.is_torchs}:
            health.position.count_calls_of_torch(lanes)
            self._post()
            seen[health.rank] = health.place(code=seen[health.rank].code)
        return seen

    def _silent_ranks(self, now: float) -> list[int]:
        silent = []
        for rank, place in self._seen.items():
            if place.has_left or self._signs_of_life.get(rank, (None,))[0] != place.seen:
                self._signs_of_life[rank] = place.seen, now
            elif now - self._signs_of_life[rank][1] > _SILENCE_SECONDS:
                silent.append(rank)
        return silent

    def _warn_of(self, rank: int, what: str) -> None:
        where = self._seen.get(rank)
        last_seen = "" if where is None else f" Rank {rank} was last seen in {where}."
        warn_user(
            f"rank {self._health.rank} waits in {self._work} for rank {rank}, {what}.{last_seen} Resume or end the "
            f"process of rank {rank}. Rank {self._health.rank} raises an error after {self._work.timeout_seconds:g} s"
        )

    def _post(self) -> None:
        health, code = self._health, user_code(sys._getframe())
        health.notices.post(lambda: health.place(code=code))
