"""Ranks gather texts at a store by way of rank 0. Threads stand for ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from meeting import in_threads
from syncline import CollectiveTimeout, PeerLost, SynclineError
from syncline.liveness import SignedStore, gathering
from syncline.liveness.gathering import Lookout, StoreGathering


class CountingStore:
    """A store that counts the keys of the requests of one rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.num_keys: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(keys: Any, *arguments: Any) -> Any:
            self.num_keys[name] += 1 if isinstance(keys, str) else len(keys)
            return request(keys, *arguments)

        return counted


def gathering_of(store: Any, rank: int, size: int, **more: Any) -> StoreGathering:
    more = {"timeout_seconds": 20.0, "purpose": "in a test", **more}
    return StoreGathering(SignedStore(store, token=None), "test", rank=rank, size=size, **more)


def only(ended: int) -> Callable[[Sequence[int]], list[int]]:
    """A function that finds one ended rank."""
    return lambda ranks: [rank for rank in ranks if rank == ended]


def keys_requested(size: int) -> list[Counter[str]]:
    """Gather twice, and return the numbers of keys that each rank has requested."""
    store = dist.HashStore()
    counting = [CountingStore(store) for _ in range(size)]
    found: dict[int, list[list[bytes]]] = {}

    def gather(rank: int) -> None:
        exchange = gathering_of(counting[rank], rank, size)
        found[rank] = [exchange(f"{rank} {number}".encode()) for number in range(2)]

    in_threads([lambda rank=rank: gather(rank) for rank in range(size)])
    expected = [[f"{rank} {number}".encode() for rank in range(size)] for number in range(2)]
    assert found == dict.fromkeys(range(size), expected)
    return [one.num_keys for one in counting]


def test_the_requests_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    few, many = keys_requested(4), keys_requested(8)
    assert {frozenset(one.items()) for one in few[1:]} == {frozenset(one.items()) for one in many[1:]}
    assert many[1].total() == 6  # in each of the two calls: write, wait and read
    assert many[0].total() - few[0].total() == 2 * 2 * (8 - 4)  # rank 0 waits for each key, and reads it


def errors_of(calls: dict[int, StoreGathering]) -> dict[int, Exception]:
    errors: dict[int, Exception] = {}

    def gather(rank: int) -> None:
        try:
            calls[rank](b"here")
        except Exception as error:
            errors[rank] = error

    in_threads([lambda rank=rank: gather(rank) for rank in calls])
    return errors


def test_ranks_that_do_not_take_part_are_named_on_all_ranks() -> None:
    store = dist.HashStore()
    errors = errors_of({rank: gathering_of(store, rank, 4, timeout_seconds=1.5) for rank in (0, 2)})
    assert sorted(errors) == [0, 2]
    for rank, error in errors.items():
        assert isinstance(error, CollectiveTimeout)
        assert f"rank {rank} of 4 waited 1.5 s in a test, but ranks 1, 3 did not take part" in str(error)
    errors = errors_of({1: gathering_of(dist.HashStore(), 1, 2, timeout_seconds=0.1)})
    assert "rank 0 did not take part" in str(errors[1])


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("kind", ["of this process", "with connections"])
def test_an_ended_rank_is_named_before_the_deadline(kind: str, lost: int) -> None:
    if kind == "of this process":
        stores = [dist.HashStore()] * 3
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(3)]

    left = [rank for rank in range(3) if rank != lost]
    errors = errors_of(
        {
            rank: gathering_of(stores[rank], rank, 3, timeout_seconds=250.0, has_ended=only(lost))
            for rank in left
        }
    )
    for rank in left:
        assert isinstance(errors[rank], PeerLost)
        assert f"rank {rank} of 3 lost rank {lost} in a test: its process has ended" in str(errors[rank])


def test_a_rank_looks_at_few_processes_at_a_time_and_all_together_look_at_all() -> None:
    looked_at: list[list[int]] = []

    def has_ended(ranks: Sequence[int]) -> list[int]:
        looked_at.append(list(ranks))
        return []

    lookouts = [Lookout(rank, 64, has_ended) for rank in range(64)]
    assert not any(lookout.ended() for lookout in lookouts)
    assert max(map(len, looked_at)) <= 4
    assert {rank for ranks in looked_at for rank in ranks} == set(range(64))
    looked_at.clear()
    for _ in range(21):
        lookouts[5].ended()
    assert {rank for ranks in looked_at for rank in ranks} == set(range(64)) - {5}


@pytest.mark.parametrize("ended", [0, 1])
def test_an_ended_rank_that_has_written_is_named_and_not_a_slow_one(ended: int) -> None:
    """Rank 2 is slow. The others do not wait for it in vain, and do not blame it."""
    store, more = dist.HashStore(), {"timeout_seconds": 300.0, "has_ended": only(ended)}
    SignedStore(store, token=None).set(f"test/0/{ended}", "written")
    left = 1 - ended
    errors = errors_of({left: gathering_of(store, left, 3, **more)})
    assert isinstance(errors[left], PeerLost)
    assert f"rank {left} of 3 lost rank {ended} in a test: its process has ended" in str(errors[left])
    if left == 0:
        late = errors_of({2: gathering_of(store, 2, 3, **more)})
        assert "rank 2 of 3 lost rank 1 in a test" in str(late[2])


def test_a_rank_reads_all_texts_if_rank_0_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_GRACE_SECONDS", 0.02)
    store = dist.HashStore()
    SignedStore(store, token=None).set("test/0/0", "rank 0")
    late = gathering_of(store, 1, 2, timeout_seconds=0.02)
    assert late(b"rank 1") == [b"rank 0", b"rank 1"]


@pytest.mark.parametrize("ended", [0, 2])
def test_a_rank_does_not_wait_for_rank_0_if_a_rank_has_ended_that_has_written(ended: int) -> None:
    """Rank 0 has ended before it wrote all texts, or it has noticed the end of rank 2 elsewhere, and stopped."""
    store = dist.HashStore()
    for rank in (0, 2):
        SignedStore(store, token=None).set(f"test/0/{rank}", "written")
    gather = gathering_of(store, 1, 3, timeout_seconds=300.0, has_ended=lambda ranks: [ended])
    assert f"rank 1 of 3 lost rank {ended}" in str(errors_of({1: gather})[1])


def test_junk_in_rank_0s_message_is_a_named_error() -> None:
    for junk in ("no JSON", "[]", '["only one"]', "[1, 2]", '{"ended": []}', '{"ended": "1"}'):
        store = dist.HashStore()
        SignedStore(store, token=None).set("test/0/0 and all", junk)
        (error,) = errors_of({1: gathering_of(store, 1, 2)}).values()
        assert isinstance(error, SynclineError), junk
        assert "key 'test/0/0 and all' at the store: expected a list of 2 texts" in str(error), junk


def test_a_rank_can_look_for_ended_ranks_while_it_waits_for_something_else() -> None:
    gather = gathering_of(dist.HashStore(), 1, 4, has_ended=only(0))
    with pytest.raises(PeerLost, match="rank 1 of 4 lost rank 0 in a test: its process has ended"):
        gather.check_processes()
    gathering_of(dist.HashStore(), 1, 4).check_processes()  # the processes are not known
