"""A wait that has lasted for a while: the peers are told of it, and where they are is looked at.

Nobody is told of a wait that is soon over, so what is here costs a healthy step nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from syncline.board import Place
from syncline.transport.deadlock import steady
from syncline.transport.health import Health
from syncline.transport.publisher import SIGN_OF_LIFE_SECONDS
from syncline.transport.torch_calls import num_started
from syncline.transport.user_code import user_code, warn_user

if TYPE_CHECKING:
    from syncline.transport.watched_work import WatchedWork

__all__ = ["LongWait"]

_LOOK_SECONDS = 0.5
_LOOK_SECONDS_OF_MANY = 1.0
_MANY_RANKS = 16
_SILENCE_SECONDS = 2 * SIGN_OF_LIFE_SECONDS
_STOPPED = "whose process is stopped (by SIGSTOP, Ctrl-Z or a debugger)"
_SILENT = f"which has given no sign of life for {_SILENCE_SECONDS:g} s (it is stopped, or cannot be reached)"


class LongWait:
    """Told to the peers while it lasts.

    Args:
        health: of the transport.
        work: what is waited for.
    """

    def __init__(self, health: Health, work: WatchedWork) -> None:
        self._health = health
        self._work = work
        self._period_seconds = _LOOK_SECONDS if health.size <= _MANY_RANKS else _LOOK_SECONDS_OF_MANY
        self._next_look = time.monotonic() + self._period_seconds / 2  # half of it has been waited already
        self._seen: dict[int, Place] = {}
        self._heard: dict[int, tuple[float, float]] = {}
        """Of each rank the time of its last sign of life by its own clock, and since when that is known, by ours."""
        self._warned_of: set[int] = set()

    def __enter__(self) -> LongWait:
        health = self._health
        health.num_waits += 1
        blocks_rank = health.calling_thread == threading.get_ident()
        health.wait = self._work.as_wait(number=health.num_waits, blocks_rank=blocks_rank)
        self._post()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._health.wait = None
        self._health.num_started_by_torch = {}
        if error is None:
            self._post()

    def look_around(self) -> None:
        """Raise if the transport has ended, or if this wait can never end; warn of ranks that are stopped."""
        health = self._health
        health.raise_if_told()
        now = time.monotonic()
        if health.notices is None or now < self._next_look:
            return
        self._next_look = now + self._period_seconds
        seen = self._look()
        ended = [rank for rank in health.ended_ranks() if rank not in seen or not seen[rank].has_left]
        if ended and not self._work.is_completed():
            raise health.lost(self._work, ended)
        health.raise_if_hopeless(self._work, seen, steady(self._seen, seen))
        self._seen = seen
        halted = dict.fromkeys(self._silent_ranks(now), _SILENT) | dict.fromkeys(
            health.stopped_ranks(), _STOPPED
        )
        for rank, what in sorted(halted.items()):
            if rank not in self._warned_of:
                self._warn_of(rank, what)
        self._warned_of = set(halted)

    def _look(self) -> dict[int, Place]:
        """Where the ranks are. Where one waits in torch.distributed, all say how far they have come there."""
        health = self._health
        seen = health.places()
        lanes = {
            place.wait.lane for place in seen.values() if place.wait is not None and place.wait.is_torchs
        }
        if lanes:
            health.num_started_by_torch = num_started(lanes)
            self._post()
            seen[health.rank] = health.place(code=seen[health.rank].code)
        return seen

    def _silent_ranks(self, now: float) -> list[int]:
        silent = []
        for rank, place in self._seen.items():
            if place.has_left or self._heard.get(rank, (None,))[0] != place.seen:
                self._heard[rank] = place.seen, now
            elif now - self._heard[rank][1] > _SILENCE_SECONDS:
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
