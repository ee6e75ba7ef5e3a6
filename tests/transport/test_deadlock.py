"""Which ranks cannot go on, by arithmetic: no processes, no clock."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from syncline.liveness import Place, Wait
from syncline.liveness.deadlock import absent_ranks, different_calls, left_ranks, steady, stuck_ranks


def waiting(
    lane: str, call: int | None, *, words: str = "x", blocks_rank: bool = True, **started: int
) -> Place:
    wait = Wait(lane=lane, call=call, words=words, blocks_rank=blocks_rank)
    return Place(wait=wait, num_started=started)


def running(**started: int) -> Place:
    return Place(num_started=started)


def test_two_ranks_on_two_lanes_wait_for_each_other() -> None:
    places = {
        0: waiting("main", 4, main=4, gradients=6),
        1: waiting("gradients", 7, main=3, gradients=7),
    }
    assert stuck_ranks(places) == [0, 1]


MAY_STILL_END = {
    "slow, but going on": running(main=3, gradients=7),
    "rank 0 has started that call": waiting("gradients", 6, main=3, gradients=6),
    "it has started rank 0's call": waiting("gradients", 7, main=4, gradients=7),
    "an earlier call of the same lane": waiting("main", 3, main=3, gradients=6),
    "a message: who has it to send is not known": waiting("gradients", None, main=3, gradients=7),
    "another thread may go on": waiting("gradients", 7, main=3, gradients=7, blocks_rank=False),
    "rank 0's lane is not known there": waiting("gradients", 7, gradients=7),
}


def test_what_may_still_end_is_no_deadlock() -> None:
    for why, other in MAY_STILL_END.items():
        assert stuck_ranks({0: waiting("main", 4, main=4, gradients=6), 1: other}) == [], why


def test_a_ring_of_three_is_found_and_who_waits_for_it_belongs_to_it() -> None:
    places = {
        0: waiting("a", 1, a=1, b=0, c=1),
        1: waiting("b", 1, a=0, b=1, c=1),
        2: waiting("a", 1, a=1, b=1, c=0),
        3: running(a=0, b=0, c=0),
    }
    assert stuck_ranks(places) == [0, 1, 2]
    del places[1]
    assert stuck_ranks(places) == []


def test_a_rank_that_nobody_saw_proves_nothing() -> None:
    assert stuck_ranks({0: waiting("main", 1, main=1)}) == []


def test_one_call_in_different_words_is_a_mismatch_of_those_ranks() -> None:
    places = {
        0: waiting("main", 2, words="barrier"),
        1: waiting("main", 2, words="all_reduce"),
        2: waiting("main", 1, words="split"),
        3: running(),
        4: waiting("main", None, words="recv"),
        5: waiting("gradients", 2, words="all_reduce"),
    }
    assert different_calls(places) == [0, 1]
    del places[1]
    assert different_calls(places) == []


def test_absent_is_who_has_not_started_the_call_and_left_who_never_will() -> None:
    wait = Wait(lane="main", call=3, words="barrier")
    places = {
        0: waiting("main", 3, main=3),
        1: running(main=2),
        2: Place(num_started={"main": 2}, has_left=True),
        3: Place(num_started={"main": 3}, has_left=True),
    }
    assert absent_ranks(wait, places) == [1, 2]
    assert left_ranks(wait, places) == [2]


def test_of_an_old_sighting_and_a_new_one_only_the_same_wait_counts() -> None:
    first = Place(wait=Wait(lane="main", call=1, words="x", number=1))
    again = Place(step=1, wait=Wait(lane="main", call=1, words="x", number=1))
    other = Place(wait=Wait(lane="main", call=1, words="x", number=2))
    assert steady({0: first, 1: first}, {0: again, 1: other, 2: first}) == {
        0: again,
        1: Place(),
        2: Place(),
    }


def in_torch(call: int) -> Place:
    wait = Wait(lane="torch group 0", call=call, words="torch.distributed.all_reduce", is_torchs=True)
    return Place(wait=wait, num_started={"main": 3})


def test_a_rank_in_a_call_of_torch_waits_for_who_has_not_started_it() -> None:
    started = {"main": 4, "torch group 0": 6}
    here = Place(wait=Wait(lane="main", call=4, words="broadcast"), num_started=started)
    assert stuck_ranks({0: in_torch(7), 1: here}) == [0, 1]
    assert stuck_ranks({0: in_torch(7), 1: here, 2: in_torch(7), 3: running(main=3)}) == [0, 1, 2]


def test_a_call_of_torch_that_may_end_is_no_deadlock() -> None:
    for why, started in {
        "started already, and not waited for": {"main": 4, "torch group 0": 7},
        "another group": {"main": 4, "torch group 1": 6},
        "not in the group, or another thread may start it": {"main": 4},
    }.items():
        here = Place(wait=Wait(lane="main", call=4, words="broadcast"), num_started=started)
        assert stuck_ranks({0: in_torch(7), 1: here}) == [], why


def test_calls_of_torch_are_not_compared_by_number_for_it_counts_messages_as_well() -> None:
    barrier = Wait(lane="torch group 0", call=7, words="torch.distributed.barrier", is_torchs=True)
    assert different_calls({0: in_torch(7), 1: Place(wait=barrier)}) == []


class CountedLookups(dict[str, int]):
    """A map that counts how often it is asked."""

    lookups: ClassVar[Counter[str]] = Counter()

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.lookups["get"] += 1
        return super().get(key, default)


def test_each_place_is_looked_at_once_for_each_call_in_which_ranks_wait() -> None:
    for size in (8, 16):
        CountedLookups.lookups.clear()
        wait = Wait(lane="main", call=2, words="barrier")
        places = {rank: Place(wait=wait, num_started=CountedLookups(main=2)) for rank in range(1, size)}
        places[0] = Place(num_started=CountedLookups(main=1))
        assert stuck_ranks(places) == []
        assert CountedLookups.lookups["get"] == size
