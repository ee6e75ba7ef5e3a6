"""What ranks tell each other beside the data, through their process group's store.

Three things: why the group is broken (the first to know tells the others, who look while they wait), where each rank
is (so that whoever waits can say who is elsewhere), and which process each rank is. Telling is best effort: when the
store is gone, ranks still have their own errors.

The thread that lets the peers know where this rank is while it does not wait for them.

One a process. It holds nothing alive, and ends before the interpreter does: a thread that is in C++ when Python shuts
down aborts the process.
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
from syncline.liveness.calls import Failure
from syncline.liveness.processes import RankProcess
from syncline.liveness.store_connection import clone_of
from syncline.liveness.store_messages import SignedStore
from syncline.liveness.torch_calls import call_in_dump
from syncline.user_code import dump_of_main_thread, user_code_in_dump

__all__ = ["SIGN_OF_LIFE_SECONDS", "Notices", "Published", "Publisher", "publisher"]


T = TypeVar("T")

_STORE_TIMEOUT = timedelta(seconds=1)

_MAX_READS = 100
"""How often the other ranks' processes are looked for in quick succession."""


class Notices:
    """One rank's view of its group's notices; any thread of the process that made it may use it.

    Args:
        store: the group's store; a connection of its own is opened, so that nobody's use of it is disturbed.
        rank: this rank in the group.
        size: number of ranks in the group.
    """

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._has_left = False
        # Two threads that wait for answers on one connection of a TCPStore would take each other's.
        self._lock = threading.Lock()
        own, self._line = clone_of(store, _STORE_TIMEOUT)
        self._store: SignedStore | None = SignedStore(PrefixStore("syncline", own))
        # Old notices stay in the store, and a group that is made again under the same name must not see them.
        # Each rank counts for itself how often that was: to ask another rank would be to wait for it.
        self._epoch = self._ask(lambda store: store.count_up(f"epoch/{rank}"))
        self._process = RankProcess.own()
        self._processes: dict[int, RankProcess] = {}
        self._num_reads = 0
        if (process := self._process) is not None:
            key = self._key(f"process/{rank}")
            self._ask(lambda store: store.set(key, process.to_json()))

    def publish(self, failure: Failure) -> Failure:
        """Tell why the group is broken; the first notice stays, and is what all ranks go by."""
        mine = failure.to_json(self._rank)
        try:
            told = self._ask(lambda store: store.set_first(self._key("failure"), mine))
        except SynclineError:  # junk is there; what this rank knows is the better reason
            return failure
        return failure if told is None or told == mine else self._parsed(told)

    def failure(self) -> Failure | None:
        """Why the group is broken, in the words of the rank that knew first; None if nobody said.

        What cannot be read there is a reason as well: nobody could learn the true one any more.
        """
        key = self._key("failure")
        try:
            told = self._ask(lambda store: store.get(key) if store.has(key) else None)
        except SynclineError as error:
            return Failure(SynclineError, str(error))
        return None if told is None else self._parsed(told)

    def _parsed(self, told: str) -> Failure:
        try:
            return Failure.from_json(told)
        except SynclineError as error:
            return Failure(SynclineError, str(error))

    def post(self, news: Callable[[], Place | None]) -> None:
        """Tell where this rank is.

        Args:
            news: says where, when it is this call's turn: of two threads that tell, the later knows better. None if
                that is known.
        """
        key = self._key(f"place/{self._rank}")

        def tell(store: SignedStore) -> None:
            place = None if self._has_left else news()
            if place is not None:
                store.set(key, place.to_json())

        self._ask(tell)

    def leave(self, place: Place) -> None:
        """Tell where this rank was last, for good.

        No answer is waited for: at the end of a program the process that holds the store may be ending as well, and a
        connection that closes while torch waits on it is a C++ stack trace on stderr.
        """

        def tell(store: SignedStore) -> None:
            self._has_left = True
            store.set(key, place.to_json())

        key = self._key(f"place/{self._rank}")
        self._ask(tell)

    def places(self) -> dict[int, Place]:
        """Where each rank was last seen; without those that have told nothing."""
        return self._read_all("place", Place.from_json)

    def processes_here(self) -> dict[int, RankProcess]:
        """The processes of the other ranks on this host. Once all ranks have named theirs, the store is not read."""
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
        """Whether the other ranks' processes are still to be learned; they name them as soon as they make theirs."""
        is_complete = self._process is None or len(self._processes) == self._size
        return not is_complete and self._num_reads < _MAX_READS

    def _read_all(self, name: str, parsed: Callable[[str], T]) -> dict[int, T]:
        """What each rank has said of itself."""
        keys = {self._key(f"{name}/{rank}"): rank for rank in range(self._size)}
        found = {}
        for key, text in (self._ask(lambda store: store.readable(list(keys))) or {}).items():
            with contextlib.suppress(SynclineError):  # it only informs, most often in an error of its own
                found[keys[key]] = parsed(text)
        return found

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    def _ask(self, question: Callable[[SignedStore], T]) -> T | None:
        """The store's answer; None once it is gone, and in a fork, to which its connection does not belong."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if self._store is not None and (self._line is None or self._line.is_open()):
                try:
                    return question(self._store)
                except SynclineError:
                    raise  # the store is there, but what it holds is not ours
                except RuntimeError:
                    pass
            self._store = None
        return None


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
