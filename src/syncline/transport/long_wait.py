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
from syncline.transport.user_code import user_code

if TYPE_CHECKING:
    from syncline.transport.watched_work import WatchedWork

__all__ = ["LongWait"]

_LOOK_SECONDS = 0.5
_LOOK_SECONDS_OF_MANY = 1.0
_MANY_RANKS = 16


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
        if error is None:
            self._post()

    def look_around(self) -> None:
        """Raise if a peer has told of the end of the transport, or if this wait can never end."""
        health = self._health
        health.raise_if_told()
        now = time.monotonic()
        if health.notices is None or now < self._next_look:
            return
        self._next_look = now + self._period_seconds
        seen = health.places()
        health.raise_if_hopeless(self._work, seen, steady(self._seen, seen))
        self._seen = seen

    def _post(self) -> None:
        health, code = self._health, user_code(sys._getframe())
        if health.notices is not None:
            health.notices.post(lambda: health.place(code=code))
