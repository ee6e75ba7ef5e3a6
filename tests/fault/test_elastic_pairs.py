"""A second death while the ranks follow the first one. `python tests/fault/elastic_pairs.py` runs hundreds of them."""

from __future__ import annotations

from dataclasses import replace

import elastic
import elastic_pairs
import pytest
from elastic import LONG_SECONDS, Fault
from elastic_pairs import CHANGES, VICTIMS

from syncline.testing import RankPool

both_transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


@pytest.mark.parametrize(
    ("change", "rank", "transport", "place"),
    [
        ("a rank is lost", 1, "c10d", "await _own_address 1"),  # Gloo waits for its address
        ("a rank is lost", 0, "shm", "await send_file 3"),  # it has the memory of a lane of the wrapper
        ("a process joins", 2, "shm", "await receive_file 3"),
        ("a process joins", 2, "c10d", "await _own_address 4"),  # Gloo connects a lane of the wrapper
    ],
)
def test_a_process_that_is_lost_while_the_others_wait_for_it_is_not_waited_for(
    change: str, rank: int, transport: str, place: str, rank_pool: RankPool
) -> None:
    store, plan = elastic.held_store(), CHANGES[change]
    death = Fault(rank=rank, step=0 if rank == plan.size else 3, place=place)
    plan = replace(plan, transport=transport, faults=(*plan.faults, death), port=store.port)
    # Who waits for the lost process until a time is up hangs.
    plan = replace(
        plan, timeout_seconds=LONG_SECONDS, patience_seconds=LONG_SECONDS, connect_seconds=LONG_SECONDS
    )
    _, awaits = elastic_pairs.run(plan, rank_pool)
    assert awaits == place.removeprefix("await ")


@pytest.mark.real
@both_transports
@pytest.mark.parametrize(("change", "rank"), VICTIMS)
def test_a_process_may_be_lost_at_each_await_of_a_change(
    change: str, rank: int, transport: str, rank_pool: RankPool
) -> None:
    took, num_failed = elastic_pairs.run_awaits(change, rank, transport, rank_pool, step=8)
    assert num_failed == 0
    assert len(took) > 3


@pytest.mark.real
@pytest.mark.parametrize("seed", range(8))
def test_two_processes_may_be_lost_close_together(seed: int, rank_pool: RankPool) -> None:
    store = elastic.held_store()
    elastic_pairs.run(elastic_pairs.drawn_pair(seed, store.port), rank_pool)
