"""The thread that lets the peers know where this rank is while it does not wait for them.

One a process. It holds nothing alive, and ends before the interpreter does: a thread that is in C++ when Python shuts
down aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

from syncline.board import Place
from syncline.errors import SynclineError
from syncline.transport.calls import Failure
from syncline.transport.main_thread import dump_of_main_thread
from syncline.transport.notices import Notices
from syncline.transport.torch_calls import call_in_dump
from syncline.transport.user_code import user_code_in_dump

__all__ = ["SIGN_OF_LIFE_SECONDS", "Published", "Publisher", "publisher"]

_PERIOD_SECONDS = 0.5
_LEARNING_SECONDS = 0.02
SIGN_OF_LIFE_SECONDS = 5.0
"""A place that does not change is told again so often: who is silent for longer does not run."""
_JOIN_SECONDS = 5.0


class Published(Protocol):
    """What has a place to tell."""

    notices: Notices | None
    rank: int
    calling_thread: int

    def is_live(self) -> bool:
        """Whether there is still something to tell; once not, never again."""

    def place(self) -> Place:
        """Where this rank is."""

    def told(self, failure: Failure) -> SynclineError:
        """A peer has told of the end of the transport; what this rank raises."""


class Publisher:
    """Tells the places of what was added, each while it lives."""

    def __init__(self) -> None:
        self._told: WeakKeyDictionary[Published, Place] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._is_learning = False
        self._thread: threading.Thread | None = None

    def add(self, what: Published) -> None:
        """Begin to tell where this rank is; once the process ends, do nothing."""
        with self._lock:
            if self._ended:
                return
            self._told[what] = Place()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="syncline board", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is ending already
                    self._thread.start()
        self._wake.set()

    def end(self) -> None:
        """End the thread."""
        with self._lock:
            self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(self._period_seconds())
            self._wake.clear()
            self._tell_all()

    def _period_seconds(self) -> float | None:
        if self._is_learning:
            return _LEARNING_SECONDS  # a rank that has the store may be lost right after the first step
        return _PERIOD_SECONDS if len(self._told) else None

    def _tell_all(self) -> None:
        with self._lock:
            current = list(self._told)
        self._is_learning = False
        for what in current:
            if self._ended:
                return
            with contextlib.suppress(Exception):  # a thread that only informs has nobody to raise to
                self._tell(what)

    def _tell(self, what: Published) -> None:
        if what.notices is None or not what.is_live():
            with self._lock:
                self._told.pop(what, None)
            return
        what.notices.post(lambda: self._news(what))
        what.notices.processes_here()  # learned in good time: a store may end with the rank that is lost
        self._is_learning |= what.notices.is_learning
        place = self._told.get(what)
        if place is not None and place.wait is not None and place.wait.is_torchs:
            self._end_torch_call(what, what.notices)

    def _end_torch_call(self, what: Published, notices: Notices) -> None:
        """Raise in the main thread what its peers have proved: that its call of torch.distributed can never end."""
        failure, call = notices.failure(), call_in_dump(dump_of_main_thread())
        if failure is not None and call is not None and what.rank in failure.stuck_ranks:
            call.end(what.told(failure))

    def _news(self, what: Published) -> Place | None:
        """Where `what` is, unless that was told. Walking the stack costs most, so only who stays gets a line."""
        place, told = what.place(), self._told[what]
        was_in_torch_call = told.wait is not None and told.wait.is_torchs
        stays = place.is_as(replace(told, wait=None) if was_in_torch_call else told)
        if stays or place.wait is not None:
            dump, main = dump_of_main_thread(), threading.main_thread().ident or 0
            place = replace(place, code=user_code_in_dump(dump, main))
            call = call_in_dump(dump)
            # A rank that has started something since was seen before the call.
            if call is not None and place.wait is None and what.place().is_as(place):
                wait = call.as_wait(blocks_rank=what.calling_thread in (0, main))
                place = replace(place, wait=wait)
        if place.is_as(told) and place.code == told.code and place.seen - told.seen < SIGN_OF_LIFE_SECONDS:
            return None
        self._told[what] = place
        return place


_publisher: Publisher | None = None


def publisher() -> Publisher:
    """The one of this process."""
    global _publisher
    if _publisher is None:
        _publisher = Publisher()
        atexit.register(_publisher.end)
    return _publisher


def _forget_the_parents() -> None:
    """A fork has no thread but its own."""
    global _publisher
    if _publisher is not None:
        atexit.unregister(_publisher.end)
    _publisher = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
