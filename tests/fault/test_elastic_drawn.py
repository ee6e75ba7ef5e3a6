"""Several faults of one job in `sl.steps`: drawn, close together, and at each await. The same programs run hundreds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import elastic_drawn
import elastic_pairs
import pytest
from elastic import LONG_SECONDS, Fault
from elastic_cases import TRANSPORTS, Runs, of_all
from elastic_pairs import CHANGES, VICTIMS

from support.cases import case


def seeds(num_in_each_change: int, num_in_all: int) -> pytest.MarkDecorator:
    others = pytest.param(range(num_in_each_change, num_in_all), marks=pytest.mark.nightly)
    return pytest.mark.parametrize("seeds", [range(num_in_each_change), others])


@seeds(3, 20)
def test_with_several_faults_every_step_and_sample_counts_once(seeds: range, run: Runs) -> None:
    for seed in seeds:
        with case("seed", seed):
            elastic_drawn.run(seed, run)


@seeds(1, 8)
def test_two_processes_may_be_lost_close_together(seeds: range, run: Runs) -> None:
    for seed in seeds:
        with case("seed", seed):
            elastic_pairs.run(elastic_pairs.drawn_pair(seed), run)


@of_all([*product(VICTIMS, TRANSPORTS)])
def test_a_process_may_be_lost_at_each_await_of_a_change(
    run: Runs, victim: tuple[str, int], transport: str
) -> None:
    took, num_failed = elastic_pairs.run_awaits(*victim, transport, run, step=8)
    assert num_failed == 0
    assert len(took) > 3


AWAITS = [
    ("a rank is lost", 1, "c10d", "_own_address 1"),  # Gloo waits for its address
    ("a rank is lost", 0, "shm", "send_file 3"),  # it has the memory of a lane of the wrapper
    ("a process joins", 2, "shm", "receive_file 3"),
    ("a process joins", 2, "c10d", "_own_address 4"),  # Gloo connects a lane of the wrapper
]


@of_all(AWAITS, num_paired=4)
def test_a_process_that_is_lost_while_the_others_wait_for_it_is_not_waited_for(
    run: Runs, change: str, rank: int, transport: str, place: str
) -> None:
    plan = CHANGES[change]
    death = Fault(rank=rank, step=0 if rank == plan.size else 3, place=f"await {place}")
    # Who waits for the lost process until a time is up hangs.
    long = ("timeout_seconds", "patience_seconds", "connect_seconds")
    plan = replace(plan, **dict.fromkeys(long, LONG_SECONDS))
    plan = replace(plan, transport=transport, faults=(*plan.faults, death))
    _, awaits = elastic_pairs.run(plan, run)
    assert awaits == place
