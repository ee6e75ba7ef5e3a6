"""Calls of torch.distributed's own, seen from another thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from syncline.liveness import calls
from syncline.liveness.calls import _as_announced, _close_connections, call_in_dump, num_started


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def test_a_rank_says_how_far_it_has_come_unless_another_thread_may_go_on(group: dist.ProcessGroup) -> None:
    lane = f"torch group {group.group_name}"
    dist.all_reduce(torch.ones(1))
    found: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: found.append(num_started({lane, "another"})))
    thread.start()
    thread.join()
    assert found == [{}], "the main thread is in the user's code"
    assert num_started({lane, "another"}) == {lane: 1}
    assert num_started({"another"}) == {}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions collect between instructions only")
def test_no_garbage_collection_begins_while_python_lists_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.11, one that lets another thread end meanwhile would stop the whole process for ever."""
    list_threads, inside, begun = sys._current_frames, threading.Event(), []

    def listed() -> dict[int, FrameType]:
        inside.set()
        found = list_threads()
        inside.clear()
        return found

    def note(phase: str, _: object) -> None:
        if inside.is_set():
            begun.append(phase)

    monkeypatch.setattr(sys, "_current_frames", listed)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(30)]
    for thread in threads:
        thread.start()
    gc.callbacks.append(note)
    try:
        gc.collect()
        # Fewer new objects than there are threads are left until the next one begins.
        due: list[object] = [[] for _ in range(gc.get_threshold()[0] - 20)]
        num_started({"any"})
    finally:
        gc.callbacks.remove(note)
        end.set()
    assert due
    assert not begun


def test_who_is_in_no_call_of_torch_is_seen_in_none() -> None:
    thread = threading.main_thread().ident
    dump = f'Thread 0x{thread:x} (most recent call first):\n  File "{dist.distributed_c10d.__file__}", line 1 in '
    assert call_in_dump("") is None
    assert call_in_dump(dump + "destroy_process_group") is None
    assert call_in_dump(dump + "all_reduce") is None, "it has left it since"


def test_addresses_are_recognized_as_gloo_announces_them() -> None:
    announced = b"\2\0\0\0\0\0\0\0vm\x88" + bytes(5) + b"\2\0\xa9\xb3\x7f\0\0\1" + bytes(100)
    assert _as_announced(2, "127.0.0.1", 0xA9B3) in announced
    assert _as_announced(2, "127.0.0.1", 0xA9B4) not in announced
    assert len(_as_announced(10, "::1", 80)) == 24


class StoppedGroup:
    """A group whose store does not answer, because the process that opened it is stopped."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def get_group_store(self) -> dist.Store:
        self.goes_on.wait()
        return dist.HashStore()


def test_a_store_that_does_not_answer_holds_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.01)
    stopped = StoppedGroup()
    _close_connections(stopped)  # type: ignore[arg-type]
    stopped.goes_on.set()
