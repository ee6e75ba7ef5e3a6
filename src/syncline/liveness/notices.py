"""Notices that the ranks of a group leave for each other, and the thread that publishes them.

There are three kinds of notices: the failure of the group, the place of each rank, and the process of each rank. The
first rank that detects a failure publishes the failure, and the others read it while they wait. A waiting rank reads
the places of its peers to show them in an error.

The notices are at the store of the process group, or in shared memory if all ranks have mapped the same memory. If the
store has ended, ranks exchange no notices, but they still raise errors.

A `Publisher` is a thread that publishes the place of this rank at regular intervals. Each process has one publisher.
The publisher keeps no transport alive. The thread ends before the interpreter does, because a thread that runs C++ code
while Python shuts down aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from syncline.errors import SynclineError
from syncline.events import OBSERVERS, PlaceSeen, emit
from syncline.liveness.board import Place
from syncline.liveness.calls import Failure, call_in_dump
from syncline.liveness.connection import StoreConnection, StoreSilent
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore
from syncline.user_code import dump_of_main_thread, user_code_in_dump

T = TypeVar("T")

_MAX_READS = 100
"""The maximum number of times that a rank reads the processes of other ranks in quick succession."""


class Medium(Protocol):
    """A place where the ranks of a group leave texts for each other. Each text has a name."""

    def write(self, name: str, text: str) -> None:
        """Replace the text of this name, which no other rank writes."""

    def write_first(self, name: str, text: str) -> str | None:
        """Write a text, unless a rank has written one of this name before. Return the text that is there then.

        Returns None if that is unknown.
        """

    def read(self, name: str) -> str | None:
        """Return the text of this name; None if there is none."""

    def read_all(self, kind: str) -> dict[int, str]:
        """Return the texts of all ranks whose names are `kind/rank`, by rank. Missing texts are left out."""


class StoreMedium:
    """A medium at a store of torch.distributed.

    Args:
        connection: a connection to the store of the group, for keys of this group only. It is not that of the group, so
            requests do not delay other users of the store.
        rank: this rank in the group.
        size: the number of ranks in the group.
    """

    def __init__(self, connection: StoreConnection, *, rank: int, size: int) -> None:
        self.connection = connection
        self._size = size
        self._store: SignedStore | None = SignedStore(connection.under("syncline"))
        # Old notices stay in the store, and a group created again under the same name must not read them. Each rank
        # counts the creations separately, because a common count would mean waiting for another rank.
        self._epoch = self._ask(lambda store: store.count_up(f"epoch/{rank}"))
        if self._epoch is None:
            self._store = None  # the other ranks would not find this rank's notices

    def write(self, name: str, text: str) -> None:
        """Replace the text of this name."""
        self._ask(lambda store: store.set(self._key(name), text))

    def write_first(self, name: str, text: str) -> str | None:
        """Write a text, unless a rank has written one of this name before. Return the text that is there then."""
        return self._ask(lambda store: store.set_first(self._key(name), text))

    def read(self, name: str) -> str | None:
        """Return the text of this name; None if there is none."""
        key = self._key(name)
        return self._ask(lambda store: store.get(key) if store.has(key) else None)

    def read_all(self, kind: str) -> dict[int, str]:
        """Return the texts of all ranks. Missing and unreadable texts are left out."""
        keys = {self._key(f"{kind}/{rank}"): rank for rank in range(self._size)}
        found = self._ask(lambda store: store.readable(list(keys))) or {}
        return {keys[key]: text for key, text in found.items()}

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    def _ask(self, question: Callable[[SignedStore], T]) -> T | None:
        """Return the store's answer to a question. Return None if the store has ended, or does not answer now."""
        store = self._store
        if store is not None:
            try:
                return question(store)
            except StoreSilent:
                return None  # it may answer again later
            except SynclineError:
                raise  # the store still answers, but the message is not one of Syncline
            except RuntimeError:
                self._store = None
        return None


class Notices:
    """The object by which a rank publishes and reads the notices of its group.

    All threads of the process that created the object can use it. In a fork of the process it does nothing. It also
    does nothing until the ranks have selected a medium.

    Args:
        rank: this rank in the group.
        size: the number of ranks in the group.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._has_left = False
        self._medium: Medium | None = None
        self._writes = threading.RLock()
        """The lock that a thread holds while it publishes a place, so that no older place replaces a newer one."""
        self._process = RankProcess.own()
        self._processes: dict[int, RankProcess] = {}
        self._num_reads = 0

    @property
    def connection(self) -> StoreConnection | None:
        """The connection to the store; None if the notices are not at a store."""
        return self._medium.connection if isinstance(self._medium, StoreMedium) else None

    def use(self, medium: Medium, processes: Mapping[int, RankProcess] | None = None) -> None:
        """Exchange notices by a medium from now on. All ranks of the group select the same one.

        Args:
            medium: the medium.
            processes: the processes of the other ranks on this host, if they are known.
        """
        self._medium = medium
        if self._process is not None:
            self._processes.update(processes or {})
            self._processes[self._rank] = self._process
            medium.write(f"process/{self._rank}", self._process.to_json())

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure of the group, unless a rank has published one before. Return the one that was first."""
        mine = failure.to_json(self._rank)
        try:
            first = None if (medium := self._usable()) is None else medium.write_first("failure", mine)
        except SynclineError:  # the published failure is unreadable, so this rank's own failure says more
            return failure
        return failure if first is None or first == mine else self._parsed(first)

    def failure(self) -> Failure | None:
        """Return the failure of the group that was published first. Return None if no rank has published a failure.

        An unreadable notice also counts as a failure. The text of this failure says that the notice is unreadable.
        """
        try:
            text = None if (medium := self._usable()) is None else medium.read("failure")
        except SynclineError as error:
            return Failure(SynclineError, str(error))
        return None if text is None else self._parsed(text)

    def _parsed(self, text: str) -> Failure:
        try:
            return Failure.from_json(text)
        except SynclineError as error:
            return Failure(SynclineError, str(error))

    def post(self, place: Callable[[], Place | None]) -> None:
        """Publish the place of this rank.

        Args:
            place: a function that returns the place to publish, or None if it is already published. The function runs
                while the thread holds the lock. So if two threads publish, the later thread publishes the newer place.
        """
        if (medium := self._usable()) is None:
            return
        with self._writes:
            here = None if self._has_left else place()
            if here is not None:
                medium.write(f"place/{self._rank}", here.to_json())

    def leave(self, place: Place) -> None:
        """Publish this rank's last place. Later calls of `post` publish nothing.

        This method does not wait for an answer of the store. At the end of a program, the process that holds the store
        may end at any moment. torch prints a C++ stack trace to stderr if the connection closes during such a wait.
        """
        if (medium := self._usable()) is None:
            return
        with self._writes:
            self._has_left = True
            medium.write(f"place/{self._rank}", place.to_json())

    def places(self) -> dict[int, Place]:
        """Return the last published place of each rank, by rank. Ranks without a published place are left out."""
        return self._read_all("place", Place.from_json)

    def processes_here(self) -> dict[int, RankProcess]:
        """Return the processes of the other ranks on this host, by rank.

        Once the processes of all ranks are known, they are not read again.
        """
        if self._process is not None and len(self._processes) < self._size:
            self._num_reads += 1
            self._processes.update(self._read_all("process", RankProcess.from_json))
        return self.known_processes_here()

    def known_processes_here(self) -> dict[int, RankProcess]:
        """Return those processes of `processes_here` that are known already, without reading notices."""
        own = self._process
        return {
            rank: process
            for rank, process in list(self._processes.items())
            if rank != self._rank and own is not None and process.host == own.host
        }

    @property
    def is_learning(self) -> bool:
        """Whether some rank has not yet published its process, so that the processes should be read again soon."""
        is_complete = self._process is None or len(self._processes) == self._size
        return not is_complete and self._num_reads < _MAX_READS

    def _read_all(self, kind: str, parsed: Callable[[str], T]) -> dict[int, T]:
        """Return each rank's notice of a kind, by rank. Missing and unreadable notices are left out."""
        found = {}
        medium = self._usable()
        for rank, text in ({} if medium is None else medium.read_all(kind)).items():
            with contextlib.suppress(SynclineError):  # such a notice only adds details to an error
                found[rank] = parsed(text)
        return found

    def _usable(self) -> Medium | None:
        """Return the medium. Return None if there is none yet, or if this process is a fork."""
        return self._medium if os.getpid() == self._pid else None


_PERIOD_SECONDS = 0.5

_LEARNING_SECONDS = 0.02

SIGN_OF_LIFE_SECONDS = 5.0
"""The time in seconds after which a rank publishes an unchanged place again. A rank silent for longer has stopped."""

_JOIN_SECONDS = 5.0


class Published(Protocol):
    """An object that has a place for the publisher to publish. `Health` is such an object."""

    notices: Notices
    rank: int
    calling_thread: int

    def is_live(self) -> bool:
        """Return whether the place of the object is still to be published. Once the result is False, it stays False."""

    def place(self) -> Place:
        """Return the current place of this rank."""

    def adopted(self, failure: Failure) -> SynclineError:
        """Record a failure that a peer has published, and return the error to raise on this rank."""


class Publisher:
    """A thread that publishes the places of the added objects. It stops publishing for an object that was freed."""

    def __init__(self) -> None:
        self._last_places: WeakKeyDictionary[Published, Place] = WeakKeyDictionary()
        """The last published place of each added object."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._is_learning = False
        self._thread: threading.Thread | None = None

    def add(self, what: Published) -> None:
        """Begin to publish the place of `what`. Do nothing if the publisher has ended."""
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
        """End the publisher's thread."""
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
            return _LEARNING_SECONDS  # the process with the store may end right after the first step
        return _PERIOD_SECONDS if len(self._last_places) else None

    def _publish_all(self) -> None:
        with self._lock:
            current = list(self._last_places)
        self._is_learning = False
        for what in current:
            if self._ended:
                return
            with contextlib.suppress(Exception):  # this thread has no caller that could catch an error
                self._publish(what)

    def _publish(self, what: Published) -> None:
        if not what.is_live():
            with self._lock:
                self._last_places.pop(what, None)
            return
        before = self._last_places.get(what)
        what.notices.post(lambda: self._unpublished_place(what))
        self._emit(what, before)  # not in `post`, which holds a lock that the main thread may wait for
        what.notices.processes_here()  # read them now, because the store may end together with a lost rank
        self._is_learning |= what.notices.is_learning
        place = self._last_places.get(what)
        if place is not None and place.wait is not None and place.wait.is_torchs:
            self._end_torch_call(what)

    def _emit(self, what: Published, before: Place | None) -> None:
        place = self._last_places.get(what)
        if OBSERVERS.place_seen and place is not None and place is not before:
            with contextlib.suppress(Exception):  # an error of an observer must not end the publisher
                seen = PlaceSeen(what.rank, place.step, str(place), time.perf_counter())
                emit(OBSERVERS.place_seen, seen)

    def _end_torch_call(self, what: Published) -> None:
        """End the main thread's call of torch.distributed by an error if a peer has proved that it can never end."""
        failure, call = what.notices.failure(), call_in_dump(dump_of_main_thread())
        if failure is not None and call is not None and what.rank in failure.stuck_ranks:
            call.end(what.adopted(failure))

    def _unpublished_place(self, what: Published) -> Place | None:
        """Return the current place of `what`. Return None if that place is already published.

        The search for the current line of code is slow. So it runs only if the rank waits, or if its place has not
        changed since the last publication.
        """
        place, last = what.place(), self._last_places[what]
        was_in_torch_call = last.wait is not None and last.wait.is_torchs
        stays = place.is_as(replace(last, wait=None) if was_in_torch_call else last)
        if stays or place.wait is not None:
            dump, main = dump_of_main_thread(), threading.main_thread().ident or 0
            place = replace(place, code=user_code_in_dump(dump, main))
            call = call_in_dump(dump)
            # If the place has changed since then, `place` describes a moment before this call.
            if call is not None and place.wait is None and what.place().is_as(place):
                wait = call.as_wait(blocks_rank=what.calling_thread in (0, main))
                place = replace(place, wait=wait)
        if (
            place.is_as(last)
            and place.code == last.code
            and abs(place.seen - last.seen) < SIGN_OF_LIFE_SECONDS
        ):
            return None
        self._last_places[what] = place
        return place


@functools.cache
def publisher() -> Publisher:
    """Return the publisher of this process."""
    found = Publisher()
    atexit.register(found.end)
    return found


def _forget_publisher() -> None:
    """Forget the parent process's publisher in a fork, because the fork does not have the publisher's thread."""
    atexit.unregister(publisher().end)
    publisher.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_publisher)
