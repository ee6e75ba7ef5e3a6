"""The lanes of one object, which are closed when it is freed, or has opened new ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from syncline.transport.base import Transport


class Lanes:
    """The open lanes of one owner.

    Args:
        owner: the object that uses the lanes. They are closed when it is freed.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._close: list[weakref.finalize[Any, Any]] = []

    def open(self, purpose: str, *, of: Transport) -> Transport:
        """Open a lane of a transport for a purpose. A collective call."""
        lane = of.lane(purpose)
        self.keep([lane], of=of)
        return lane

    def keep(self, lanes: Iterable[Transport], *, of: Transport) -> None:
        """Close these lanes together with the owner.

        Args:
            lanes: the lanes.
            of: the transport of these lanes. It is not a lane of the owner, and stays open.
        """
        owner = self._owner()
        self._close += [weakref.finalize(owner, lane.close) for lane in lanes if lane is not of]

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Close the former lanes at the end of the block, which opens new ones. A garbage collection may be late."""
        former, self._close = self._close, []
        try:
            yield
        finally:
            for close in former:
                close()
