"""Notices that ranks exchange through their process group's store, and the thread that publishes them.

`Notices` carries three kinds of information: why the group is broken, where each rank is, and which process each rank
is. The first rank that detects a failure publishes it; the others read it while they wait. Positions let a waiting rank
report where the other ranks are. Publishing is best effort: without the store, each rank still raises its own error.

`Publisher` is a thread that publishes this rank's position while the rank does not wait for its peers. There is one per
process. It keeps no transport alive. It ends before the interpreter does, because a thread that runs C++ code while
Python shuts down aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch.distributed.distributed_c10d import PrefixStore

from syncline.errors import SynclineError
from syncline.liveness.board import Place
from syncline.liveness.calls import Failure, call_in_dump
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore, clone_of
from syncline.user_code import dump_of_main_thread, user_code_in_dump

T = TypeVar("T")

_STORE_TIMEOUT = timedelta(seconds=1)

_MAX_READS = 100
"""Number of reads of the other ranks' processes in quick succession."""


class Notices:
    """One rank's access to its group's notices. Any thread of the process that created it may use it.

    Args:
        store: the group's store. A separate connection is opened, so that other users of the store are not disturbed.
        rank: this rank in the group.
        size: number of ranks in the group.
    """

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._has_left = False
        # Two threads that wait for answers on one connection of a TCPStore would receive each other's answers.
        self._lock = threading.Lock()
        own, self._line = clone_of(store, _STORE_TIMEOUT)
        self._store: SignedStore | None = SignedStore(PrefixStore("syncline", own))
        # Old notices stay in the store, and a group created again under the same name must not read them. Each rank
        # counts the creations on its own, because asking another rank would mean waiting for it.
        self._epoch = self._ask(lambda store: store.count_up(f"epoch/{rank}"))
        self._process = RankProcess.own()
        self._processes: dict[int, RankProcess] = {}
        self._num_reads = 0
        if (process := self._process) is not None:
            key = self._key(f"process/{rank}")
            self._ask(lambda store: store.set(key, process.to_json()))

    def publish(self, failure: Failure) -> Failure:
        """Publish why the group is broken, and return the first failure published, which is valid for all ranks."""
        mine = failure.to_json(self._rank)
        try:
            first = self._ask(lambda store: store.set_first(self._key("failure"), mine))
        except SynclineError:  # the stored notice is unreadable, so this rank's own reason is better
            return failure
        return failure if first is None or first == mine else self._parsed(first)

    def failure(self) -> Failure | None:
        """Return the published failure, as described by the rank that detected it first; None if there is none.

        An unreadable notice counts as a failure as well, because the true reason can no longer be learned.
        """
        key = self._key("failure")
        try:
            text = self._ask(lambda store: store.get(key) if store.has(key) else None)
        except SynclineError as error:
            return Failure(SynclineError, str(error))
        return None if text is None else self._parsed(text)

    def _parsed(self, text: str) -> Failure:
        try:
            return Failure.from_json(text)
        except SynclineError as error:
            return Failure(SynclineError, str(error))

    def post(self, place: Callable[[], Place | None]) -> None:
        """Publish where this rank is.

        Args:
            place: returns the place, or None if it is already published. It is called once this thread may write, so
                that of two threads the later one publishes the newer place.
        """
        key = self._key(f"place/{self._rank}")

        def write(store: SignedStore) -> None:
            here = None if self._has_left else place()
            if here is not None:
                store.set(key, here.to_json())

        self._ask(write)

    def leave(self, place: Place) -> None:
        """Publish this rank's last place; later calls of `post` publish nothing.

        This does not wait for an answer. At the end of a program the process that holds the store may be ending as
        well, and torch prints a C++ stack trace to stderr if a connection closes while it waits.
        """

        def write(store: SignedStore) -> None:
            self._has_left = True
            store.set(key, place.to_json())

        key = self._key(f"place/{self._rank}")
        self._ask(write)

    def places(self) -> dict[int, Place]:
        """Return where each rank was last seen, without ranks that have published nothing."""
        return self._read_all("place", Place.from_json)

    def processes_here(self) -> dict[int, RankProcess]:
        """Return the processes of the other ranks on this host.

        Once the processes of all ranks are known, the store is not read again.
        """
        own = self._process
        if own is None:
            return {}
        if len(self._processes) < self._size:
            self._num_reads += 1
            self._processes.update(self._read_all("process", RankProcess.from_json))
        return {
            rank: process
            for rank, process in list(self._processes.items())
            if rank != self._rank and process.host == own.host
        }

    @property
    def is_learning(self) -> bool:
        """Whether the processes of other ranks are still unknown; each rank publishes its own at construction."""
        is_complete = self._process is None or len(self._processes) == self._size
        return not is_complete and self._num_reads < _MAX_READS

    def _read_all(self, name: str, parsed: Callable[[str], T]) -> dict[int, T]:
        """Return what each rank has published about itself under `name`."""
        keys = {self._key(f"{name}/{rank}"): rank for rank in range(self._size)}
        found = {}
        for key, text in (self._ask(lambda store: store.readable(list(keys))) or {}).items():
            with contextlib.suppress(SynclineError):  # only informative, mostly for the text of another error
                found[keys[key]] = parsed(text)
        return found

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    def _ask(self, question: Callable[[SignedStore], T]) -> T | None:
        """Return the store's answer; None once the store is gone, and in a fork, which must not use the connection."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if self._store is not None and (self._line is None or self._line.is_open()):
                try:
                    return question(self._store)
                except SynclineError:
                    raise  # the store is there, but it holds a message that is not ours
                except RuntimeError:
                    pass
            self._store = None
        return None


_PERIOD_SECONDS = 0.5

_LEARNING_SECONDS = 0.02

SIGN_OF_LIFE_SECONDS = 5.0
"""Period in which a place is published again if it does not change. A rank silent for longer does not run."""

_JOIN_SECONDS = 5.0


class Published(Protocol):
    """An object that has a place to publish."""

    notices: Notices | None
    rank: int
    calling_thread: int

    def is_live(self) -> bool:
        """Return whether there is still something to publish; once False, it stays False."""

    def place(self) -> Place:
        """Return where this rank is."""

    def adopted(self, failure: Failure) -> SynclineError:
        """Record a failure that a peer has published, and return the error to raise on this rank."""


class Publisher:
    """A thread that publishes the places of all added objects, each while it is alive."""

    def __init__(self) -> None:
        self._last_places: WeakKeyDictionary[Published, Place] = WeakKeyDictionary()
        """The places that were published last."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._is_learning = False
        self._thread: threading.Thread | None = None

    def add(self, what: Published) -> None:
        """Begin to publish the place of `what`; do nothing once the process ends."""
        with self._lock:
            if self._ended:
                return
            self._last_places[what] = Place()
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
            self._publish_all()

    def _period_seconds(self) -> float | None:
        if self._is_learning:
            return _LEARNING_SECONDS  # the rank that hosts the store may be lost right after the first step
        return _PERIOD_SECONDS if len(self._last_places) else None

    def _publish_all(self) -> None:
        with self._lock:
            current = list(self._last_places)
        self._is_learning = False
        for what in current:
            if self._ended:
                return
            with contextlib.suppress(Exception):  # no caller could catch an error of this thread
                self._publish(what)

    def _publish(self, what: Published) -> None:
        if what.notices is None or not what.is_live():
            with self._lock:
                self._last_places.pop(what, None)
            return
        what.notices.post(lambda: self._unpublished_place(what))
        what.notices.processes_here()  # read early, because the store may end together with the lost rank
        self._is_learning |= what.notices.is_learning
        place = self._last_places.get(what)
        if place is not None and place.wait is not None and place.wait.is_torchs:
            self._end_torch_call(what, what.notices)

    def _end_torch_call(self, what: Published, notices: Notices) -> None:
        """End the main thread's call of torch.distributed with an error, if peers have proved that it can never end."""
        failure, call = notices.failure(), call_in_dump(dump_of_main_thread())
        if failure is not None and call is not None and what.rank in failure.stuck_ranks:
            call.end(what.adopted(failure))

    def _unpublished_place(self, what: Published) -> Place | None:
        """Return the place of `what`; None if it is already published.

        Walking the stack costs most, so a line of code is found only for a rank that waits or has not moved.
        """
        place, last = what.place(), self._last_places[what]
        was_in_torch_call = last.wait is not None and last.wait.is_torchs
        stays = place.is_as(replace(last, wait=None) if was_in_torch_call else last)
        if stays or place.wait is not None:
            dump, main = dump_of_main_thread(), threading.main_thread().ident or 0
            place = replace(place, code=user_code_in_dump(dump, main))
            call = call_in_dump(dump)
            # If the place has changed since, it was taken before this call.
            if call is not None and place.wait is None and what.place().is_as(place):
                wait = call.as_wait(blocks_rank=what.calling_thread in (0, main))
                place = replace(place, wait=wait)
        if place.is_as(last) and place.code == last.code and place.seen - last.seen < SIGN_OF_LIFE_SECONDS:
            return None
        self._last_places[what] = place
        return place


_publisher: Publisher | None = None


def publisher() -> Publisher:
    """Return the publisher of this process."""
    global _publisher
    if _publisher is None:
        _publisher = Publisher()
        atexit.register(_publisher.end)
    return _publisher


def _forget_the_parents() -> None:
    """Drop the parent's publisher in a fork, because the fork does not have its thread."""
    global _publisher
    if _publisher is not None:
        atexit.unregister(_publisher.end)
    _publisher = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
