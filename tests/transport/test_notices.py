"""The thread that tells where a rank is, and what it stands on: the line to the store, the user's line of code."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hangs
from syncline import PeerFailed, SynclineError
from syncline.liveness import Board, Failure, Notices, Place, StoreConnection, StoreMedium
from syncline.liveness import connection as store_line
from syncline.liveness import notices as publisher_module
from syncline.liveness.connection import clone_of
from syncline.liveness.notices import Publisher
from syncline.user_code import dump_of_main_thread, user_code, user_code_in_dump


class Rank:
    """Something with a place, whose notices are kept in a list."""

    is_learning = False

    def __init__(self) -> None:
        self.board = Board()
        self.notices: Any = self
        self.rank = self.calling_thread = 0
        self.posted: list[Place] = []
        self.was_posted = threading.Condition()
        self.lives = True
        self.seconds = 100.0

    def is_live(self) -> bool:
        return self.lives

    def place(self) -> Place:
        return replace(Place.of(self.board), seen=self.seconds)

    def adopted(self, failure: Failure) -> SynclineError:
        raise AssertionError

    def processes_here(self) -> dict[int, object]:
        return {}

    def post(self, news: Callable[[], Place | None]) -> None:
        place = news()
        with self.was_posted:
            if place is not None:
                self.posted.append(place)
            self.was_posted.notify_all()


def notices_at(store: dist.Store, rank: int) -> Notices:
    notices = Notices(rank=rank, size=2)
    notices.use(StoreMedium(StoreConnection(store), rank=rank, size=2))
    return notices


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(publisher_module, "_PERIOD_SECONDS", 0.01)
    made = Publisher()
    yield made
    made.end()
    assert made._thread is None or not made._thread.is_alive()


def wait_for(rank: Rank, condition: Callable[[], object]) -> None:
    with rank.was_posted:
        assert rank.was_posted.wait_for(condition, 10)


def test_a_rank_that_moves_is_told_and_with_its_line_once_it_stays(publisher: Publisher) -> None:
    rank = Rank()
    publisher.add(rank)
    wait_for(rank, lambda: bool(rank.posted))
    rank.board.step = 5
    wait_for(rank, lambda: rank.posted[-1].step == 5 and rank.posted[-1].code is not None)
    moved, stays = [place for place in rank.posted if place.step == 5][:2]
    assert moved.code is None
    assert stays.code is not None
    assert stays.code.startswith("test_notices.py:")


def test_who_stays_gives_a_sign_of_life_now_and_then(publisher: Publisher) -> None:
    rank = Rank()
    publisher.add(rank)
    wait_for(rank, lambda: bool(rank.posted))
    rank.seconds += 6
    wait_for(rank, lambda: rank.posted[-1].seen == rank.seconds)


def test_an_error_ends_nothing_and_who_is_closed_is_forgotten(publisher: Publisher) -> None:
    broken, rank = Rank(), Rank()
    broken.notices = object()
    publisher.add(broken)
    publisher.add(rank)
    wait_for(rank, lambda: bool(rank.posted))
    rank.lives = False
    while rank in publisher._last_places:
        publisher._wake.wait(0)
    publisher.end()
    publisher.add(rank)
    assert rank not in publisher._last_places, "after the end nothing begins"


def test_nothing_is_kept_alive(publisher: Publisher) -> None:
    rank = Rank()
    publisher.add(rank)
    wait_for(rank, rank.posted.__len__)
    seen = weakref.ref(rank)
    del rank
    deadline = time.monotonic() + 10
    while seen() is not None and time.monotonic() < deadline:
        gc.collect()
    assert seen() is None


def test_a_fork_says_nothing_on_its_parents_connection() -> None:
    notices = notices_at(dist.HashStore(), rank=0)
    notices.post(lambda: Place(step=1))
    child = os.fork()
    if child == 0:
        silent = notices.publish(Failure(PeerFailed, "x")).text == "x" and notices.places() == {}
        os._exit(0 if silent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert notices.places() == {0: Place(step=1)}


def test_a_store_that_is_gone_is_seen_without_asking_it(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "input()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    clone, line = clone_of(dist.PrefixStore("a", store), timedelta(seconds=1))
    assert line is not None
    notices = notices_at(store, rank=0)
    notices.post(lambda: Place(step=1))
    assert notices.places() == {0: Place(step=1)}
    clone.set("here", "1")
    assert line.is_open()
    assert clone.get("here") == b"1"
    hangs.communicate(server, input="\n")
    assert not line.is_open()
    notices.post(lambda: Place(step=2))
    assert notices.places() == {}
    assert notices.failure() is None
    assert capfd.readouterr().err == "", "torch prints a C++ stack trace for whoever asks"


def test_a_store_without_a_server_has_no_line() -> None:
    store = dist.HashStore()
    clone, line = clone_of(store, timedelta(seconds=1))
    assert line is None
    clone.set("here", "1")
    assert store.get("here") == b"1"


def test_which_connection_is_the_clones_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system does not list sockets."""
    monkeypatch.setattr(store_line, "open_sockets", set)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clone, line = clone_of(server, timedelta(seconds=1))
    assert line is not None
    clone.set("here", "1")
    assert line.is_open()
    del clone, server
    assert not line.is_open()


def test_users_code_is_the_innermost_frame_that_is_neither_torchs_nor_ours_nor_pythons() -> None:
    seen: list[str | None] = []

    class Encoder(json.JSONEncoder):
        def default(self, o: object) -> None:
            frame = sys._getframe()
            seen.extend([user_code(frame), user_code(frame.f_back)])

    json.dumps([object()], cls=Encoder)
    inner, outer = map(str, seen)
    assert re.fullmatch(r"test_notices\.py:\d+ in default", inner)
    assert re.fullmatch(r"test_notices\.py:\d+ in test_users_code_is_.*", outer)
    assert user_code(None) is None


def place_of_main_thread() -> str | None:
    return user_code_in_dump(dump_of_main_thread(), threading.main_thread().ident or 0)


def test_where_the_main_thread_is_can_be_asked_from_any_thread() -> None:
    seen: list[str | None] = []
    asking = threading.Thread(target=lambda: seen.append(place_of_main_thread()))
    asking.start()
    asking.join()
    (place,) = seen
    assert place is not None
    assert re.fullmatch(r"test_notices\.py:\d+ in test_where_the_main_thread_is_can_be_asked_.*", place)


@pytest.mark.real
def test_the_main_thread_can_be_asked_while_threads_of_c_come_to_python_and_go() -> None:
    # Each start of one makes the interpreter list a new thread, which Python 3.11 does too early: see main_thread.py.
    program = """
import ctypes, threading
from syncline.user_code import dump_of_main_thread, user_code_in_dump

def ask():
    while not done.is_set():
        places.add(user_code_in_dump(dump_of_main_thread(), threading.main_thread().ident))

done, places = threading.Event(), set()
asking = threading.Thread(target=ask)
asking.start()
libc, visit = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
for _ in range(1000):
    threads = [ctypes.c_ulong() for _ in range(4)]
    for thread in threads:
        assert libc.pthread_create(ctypes.byref(thread), None, visit, None) == 0
    for thread in threads:
        libc.pthread_join(thread, None)
done.set()
asking.join()
assert all(place.startswith("<string>:") for place in places), places
print(len(places) > 0)
"""
    done = hangs.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_of_a_dump_the_innermost_line_of_a_users_in_the_right_thread_counts() -> None:
    dump = f"""Thread 0x00007f01 [named] (most recent call first):
  File "/home/other.py", line 1 in other

Current thread 0x00007f02 (most recent call first):
  File "{threading.__file__}", line 331 in wait
  File "{torch.__file__}", line 12 in backward
  File "<frozen runpy>", line 88 in _run_code
  File "/home/me/train, v2.py", line 7 in <module>
  File "/home/me/main.py", line 3 in main

Extension modules: numpy, torch._C (total: 2)
"""
    assert user_code_in_dump(dump, 0x7F02) == "train, v2.py:7"
    assert user_code_in_dump(dump, 0x7F01) == "other.py:1 in other"
    assert user_code_in_dump(dump, 0x7F03) is None
