"""Notices in shared memory. Two objects in this process stand for two ranks, and an object for the native core."""

from __future__ import annotations

import random
import threading
from typing import Any

from syncline import PeerFailed, PeerLost
from syncline.liveness import Failure, Notices, Place, RankProcess
from syncline.transport.shared_memory.medium import MemoryMedium

BEGIN = 64


class Memory:
    def __init__(self, size: int) -> None:
        self.map = bytearray(BEGIN + MemoryMedium.num_bytes(size))


class Core:
    """It keeps the first text by which the group is aborted."""

    text: str | None = None

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size

    def abort(self, text: str) -> None:
        Core.text = self.text or text

    def abort_text(self) -> str | None:
        return self.text


def notices_of(size: int) -> tuple[list[Notices], Any]:
    memory: Any = Memory(size)
    Core.text = None
    found = [Notices(rank=rank, size=size) for rank in range(size)]
    for rank, notices in enumerate(found):
        core: Any = Core(memory, rank, size)
        notices.use(MemoryMedium(core, BEGIN))
    return found, memory


def test_each_rank_reads_the_last_place_of_each() -> None:
    (first, second), _ = notices_of(2)
    assert first.places() == {}
    first.post(lambda: Place(step=1, code="a long line of code, which is then replaced by a short one"))
    second.post(lambda: Place(step=2))
    first.post(lambda: Place(step=3))
    assert first.places() == second.places() == {0: Place(step=3), 1: Place(step=2)}
    second.leave(Place(step=4, has_left=True))
    second.post(lambda: Place(step=5))
    assert first.places()[1] == Place(step=4, has_left=True)


def test_the_first_failure_counts() -> None:
    (first, second), _ = notices_of(2)
    assert first.failure() is None
    cause = Failure(PeerFailed, "the cause")
    assert first.publish(cause) is cause
    told = second.publish(Failure(PeerLost, "the consequence"))
    seen = second.failure()
    assert seen is not None
    assert (told.kind, told.text) == (seen.kind, seen.text) == (PeerFailed, "the cause")


def test_processes_are_known_once_all_have_begun() -> None:
    (first, second), _ = notices_of(2)
    own = RankProcess.own()
    assert first.processes_here() == {1: own}
    assert not first.is_learning
    assert second.known_processes_here() == {}


def test_what_a_killed_rank_has_half_written_is_left_out() -> None:
    (first, second), memory = notices_of(2)
    first.post(lambda: Place(step=1))
    second.post(lambda: Place(step=2))
    at = memory.map.index(b'"step": 2')
    memory.map[at : at + 9] = b'"step": 3'
    assert first.places() == {0: Place(step=1)}
    length_at = memory.map.index(b'{"step": 3') - 8
    memory.map[length_at : length_at + 4] = b"\xff" * 4
    assert first.places() == {0: Place(step=1)}


def test_a_place_that_is_too_long_is_not_kept() -> None:
    (first, second), _ = notices_of(2)
    second.post(lambda: Place(step=1))
    code = random.Random(0).randbytes(2 * MemoryMedium.num_bytes(1)).hex()
    first.post(lambda: Place(code=code))
    assert first.places() == {1: Place(step=1)}


def test_the_place_of_a_rank_with_a_thousand_lanes_is_kept() -> None:
    (first, second), _ = notices_of(2)
    place = Place(
        step=7, num_started={f"main of the module {number}": 100 + number for number in range(1000)}
    )
    assert len(place.to_json()) > 2 * MemoryMedium.num_bytes(1)
    first.post(lambda: place)
    assert second.places() == {0: place}


def test_a_reader_never_sees_half_of_a_place() -> None:
    (first, second), _ = notices_of(2)
    codes = ["a" * 3000, "b" * 5000]
    done = threading.Event()

    def write() -> None:
        for number in range(2000):
            first.post(lambda number=number: Place(code=codes[number % 2]))  # type: ignore[misc]
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.update(place.code for place in second.places().values())
    writer.join()
    assert seen <= set(codes)
    assert second.places()[0].code == codes[1]
