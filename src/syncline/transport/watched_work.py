"""Works whose wait checks from time to time for failed peers, deadlock and timeout.

`WatchedWork` waits in slices of time. Each engine implements the wait for one slice (`_ends_within`); this file
contains everything else. Some operations advance only when they are driven (see `phases.py`). While there are any,
every wait drives them.

`LongWait` publishes a wait that has lasted for a while to the peers, and reads where they are. A short wait is not
published, so a healthy step pays nothing for it.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from types import TracebackType
from typing import Protocol

from torch import Tensor

from syncline.errors import SynclineError
from syncline.liveness.board import Place, Wait
from syncline.liveness.calls import Call
from syncline.liveness.deadlock import steady
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import Health, Lane
from syncline.liveness.notices import SIGN_OF_LIFE_SECONDS
from syncline.transport.work import Work
from syncline.user_code import user_code, warn_user

SLICE_SECONDS = 0.25
"""How long a wait lasts before it checks for failures."""

MESSAGES = ("send", "recv")
"""Operations that only two ranks call, so that they have no number that is the same on all ranks."""

_BRIEF_SECONDS = 0.002
"""How long a wait sleeps while other operations need to be driven."""


class Driven(Protocol):
    """Operations that advance only when they are driven."""

    def drive(self) -> None:
        """Advance as far as is possible now. Never blocks, never raises."""

    def is_idle(self, except_for: object) -> bool:
        """Return whether no work besides `except_for` needs to be driven."""


class UnderWay:
    """All operations of this process that need to be driven."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that drives."""
        self._all: dict[int, Driven] = {}

    def add(self, what: Driven) -> None:
        """Drive `what` from now on."""
        self._all[id(what)] = what

    def remove(self, what: Driven) -> None:
        """Stop driving `what`."""
        self._all.pop(id(what), None)

    def drive(self) -> None:
        """Advance as far as is possible now, unless another thread does so already."""
        if self._all and self.lock.acquire(blocking=False):
            try:
                for what in list(self._all.values()):
                    what.drive()
            finally:
                self.lock.release()

    def is_idle(self, except_for: object) -> bool:
        """Return whether no work besides `except_for` needs to be driven."""
        return not self._all or all(what.is_idle(except_for) for what in list(self._all.values()))


under_way = UnderWay()


class Watched(Protocol):
    """The attributes of a transport that its works need."""

    @property
    def health(self) -> Health:
        """The health of the transport's group."""

    @property
    def own_lane(self) -> Lane:
        """The lane that counts the transport's calls."""

    @property
    def timeout_seconds(self) -> float:
        """The longest time that a wait may last."""


class WatchedWork(Work):
    """One operation, with its description for errors and for the peers.

    The works of all engines are constructed from the same arguments, which describe the call. A second method of each
    engine (`start`, `enter`) begins the operation.

    Args:
        transport: the transport of the call.
        operation: the operation's name, for messages.
        detail: reduce operation or peer, for messages.
        tensor: the tensor that the caller passed in; None for a barrier.
    """

    __slots__ = (
        "_detail",
        "_health",
        "_lane",
        "_number",
        "_operation",
        "_started",
        "_tensor",
        "_timeout_seconds",
    )

    def __init__(self, transport: Watched, operation: str, detail: str, tensor: Tensor | None) -> None:
        self._health = transport.health
        self._lane = lane = transport.own_lane
        self._timeout_seconds = transport.timeout_seconds
        self._operation = operation
        self._detail = detail
        self._tensor = tensor
        self._number = None if operation in MESSAGES else lane.num_started
        self._started = time.monotonic()

    @property
    def timeout_seconds(self) -> float:
        """The transport's timeout."""
        return self._timeout_seconds

    def elapsed_seconds(self) -> float:
        """Return the time since the call."""
        return time.monotonic() - self._started

    def describe_as(self, whole: WatchedWork) -> None:
        """Describe this operation in messages as `whole`, of which it is a part."""
        self._operation, self._detail, self._tensor = whole._operation, whole._detail, whole._tensor
        self._lane, self._number, self._started = whole._lane, whole._number, whole._started

    def as_wait(self, *, number: int = 0, blocks_rank: bool = True) -> Wait:
        """Return the wait for this operation, to publish to the peers."""
        tensor = self._tensor
        numel, dtype = (None, None) if tensor is None else (tensor.numel(), tensor.dtype)
        call = Call(self._operation, self._detail, numel, dtype)
        return Wait(
            lane=self._lane.name,
            call=self._number,
            words=str(call),
            number=number,
            blocks_rank=blocks_rank,
        )

    def __str__(self) -> str:
        return str(self.as_wait())

    @abstractmethod
    def _has_succeeded(self) -> bool:
        """Return whether the operation is done, as a last check after a failure. Never raises."""

    @abstractmethod
    def _ends_within(self, seconds: float) -> bool:
        """Wait for at most `seconds` and return whether the operation is done; raise the error that ended it."""

    def _wait_in_slices(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        if self._ends_driving(min(timeout_seconds, SLICE_SECONDS)):
            return
        with LongWait(self._health, self) as long_wait:
            while True:
                remaining_seconds = deadline - time.monotonic()
                if remaining_seconds <= 0:
                    raise FailedWait(self._health, self).timed_out()
                try:
                    long_wait.look_around()
                except SynclineError:
                    if self._has_succeeded():  # the failure came after this operation
                        return
                    raise
                if self._ends_driving(min(remaining_seconds, SLICE_SECONDS)):
                    return

    def _ends_driving(self, seconds: float) -> bool:
        """Wait like `_ends_within`, and drive other operations meanwhile."""
        if under_way.is_idle(except_for=self):
            return self._ends_within(seconds)
        deadline = time.monotonic() + seconds
        while True:
            under_way.drive()
            remaining_seconds = deadline - time.monotonic()
            if self._ends_within(min(remaining_seconds, _BRIEF_SECONDS)):
                return True
            if remaining_seconds <= _BRIEF_SECONDS:
                return False


_LOOK_SECONDS = 0.5

_LOOK_SECONDS_OF_MANY = 1.0

_MANY_RANKS = 16

_SILENCE_SECONDS = 2 * SIGN_OF_LIFE_SECONDS

_STOPPED = "whose process is stopped (by SIGSTOP, Ctrl-Z or a debugger)"

_SILENT = f"which has given no sign of life for {_SILENCE_SECONDS:g} s (it is stopped, or cannot be reached)"


class LongWait:
    """A long wait, published to the peers while it lasts.

    Args:
        health: the health of the transport's group.
        work: the operation that is waited for.
    """

    def __init__(self, health: Health, work: WatchedWork) -> None:
        self._health = health
        self._work = work
        self._period_seconds = _LOOK_SECONDS if health.size <= _MANY_RANKS else _LOOK_SECONDS_OF_MANY
        self._next_look = time.monotonic() + self._period_seconds / 2  # half of it has passed already
        self._seen: dict[int, Place] = {}
        self._signs_of_life: dict[int, tuple[float, float]] = {}
        """By rank: the time of its last sign of life by its own clock, and when this rank first saw it, by ours."""
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

    def look_around(self) -> None:
        """Raise if the transport has failed or this wait can never end; warn of ranks that are stopped or silent."""
        health = self._health
        health.raise_if_published()
        now = time.monotonic()
        if health.notices is None or now < self._next_look:
            return
        self._next_look = now + self._period_seconds
        seen = self._look()
        ended = [rank for rank in health.ended_ranks() if rank not in seen or not seen[rank].has_left]
        if ended and not self._work.is_completed():
            raise FailedWait(health, self._work).lost(ended)
        FailedWait(health, self._work).raise_if_endless(seen, steady(self._seen, seen))
        self._seen = seen
        halted = dict.fromkeys(self._silent_ranks(now), _SILENT) | dict.fromkeys(
            health.stopped_ranks(), _STOPPED
        )
        for rank, what in sorted(halted.items()):
            if rank not in self._warned_of:
                self._warn_of(rank, what)
        self._warned_of = set(halted)

    def _look(self) -> dict[int, Place]:
        """Return where the ranks are.

        If a rank waits in torch.distributed, publish how many calls this rank has started on that group.
        """
        health = self._health
        seen = health.places()
        lanes = {
            place.wait.lane for place in seen.values() if place.wait is not None and place.wait.is_torchs
        }
        if lanes:
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
        last_seen = "" if where is None else f". It was last seen in {where}"
        warn_user(
            f"rank {self._health.rank} waits in {self._work} for rank {rank}, {what}{last_seen}. Continue it, or end "
            f"it; this rank waits {self._work.timeout_seconds:g} s in all"
        )

    def _post(self) -> None:
        health, code = self._health, user_code(sys._getframe())
        if health.notices is not None:
            health.notices.post(lambda: health.place(code=code))
