"""Processes that join ranks which train in `sl.steps`, spare ranks, and a global batch that stays the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import elastic
import pytest
import torch
from elastic import BATCH, SAMPLES, STEPS, Fault, Samples
from elastic_cases import TRANSPORTS, Runs, of_all

import syncline as sl

HOLD = Fault(rank=0, step=3, place="forward", kind="await newcomers")
"""Rank 0 waits until the newcomers have asked to join."""

JOINED = [training for training in elastic.TRAININGS if training != "sharded"]
"""The trainings that a process can join."""


@of_all([*product((1, 2), ("every step", "PowerSGD", "4 bit"), (0, 1), TRANSPORTS)])
def test_newcomers_get_the_state_and_train_with_the_others(
    run: Runs, num_newcomers: int, training: str, keeps: int, transport: str
) -> None:
    """All join after the step in which they were seen, and no step is made twice. A rank keeps its gradients meanwhile.

    They lay out buckets in the order that the others have learnt, although they get a compression later.
    """
    size = 2 + num_newcomers
    settings = {"num_newcomers": num_newcomers, "max_ranks": size, "training": training}
    found = run(2, transport, HOLD, keeps_gradients=keeps, **settings)
    assert len(found.finals()) == size
    for rank in range(size):
        assert found.values("step", rank) == [*range(1 if rank < 2 else 4, STEPS + 1)]


@of_all([*product((0, 1), TRANSPORTS)])
def test_a_process_that_waits_takes_the_place_of_a_lost_rank(run: Runs, lost: int, transport: str) -> None:
    found = run(3, transport, HOLD, Fault(rank=lost, step=3, place="last bucket"), num_newcomers=1)
    assert len(found.finals()) == 3
    assert found.values("step", 3) == [*range(3, STEPS + 1)]


@of_all([*product(JOINED, TRANSPORTS)])
def test_a_rank_that_is_left_alone_lets_a_process_join(run: Runs, training: str, transport: str) -> None:
    """It sends nothing, so it cannot learn of the process from what it receives."""
    # Replicas that drift notice the loss only at their next sync.
    faults = Fault(rank=1, step=2, place="last bucket"), replace(HOLD, step=6)
    found = run(2, transport, *faults, num_newcomers=1, training=training)
    assert found.values("step", 2) == [7, 8]
    assert len(elastic.check_ends(found.notes, STEPS, num_forwards=None)) == 2
    if training == "every step":
        found.finals()


@of_all([*product((True, False), TRANSPORTS)])
def test_spare_ranks_wait_until_a_rank_is_lost_or_end_without_an_error(
    run: Runs, is_needed: bool, transport: str
) -> None:
    faults = [Fault(rank=1, step=5, place="last bucket")] if is_needed else []
    found = run(3, transport, *faults, max_ranks=2)
    assert len(found.finals()) == 2
    assert found.values("step", 2) == ([*range(5, STEPS + 1)] if is_needed else [])
    assert found.values("ended", 2) == ([] if is_needed else [0])


LOST_MEANWHILE = [
    *((place, 2) for place in ("meeting", "connecting", "loading")),
    *(("handing over", 0), ("handing over", 1), ("meeting", 0)),
]


@of_all([*product(LOST_MEANWHILE, TRANSPORTS)])
def test_a_rank_that_is_lost_while_another_joins(run: Runs, loss: tuple[str, int], transport: str) -> None:
    """The newcomer has not got the state yet, so it cannot be the source of it."""
    place, rank = loss
    is_newcomer = rank == 2  # which has not begun a step while it joins
    step, attempt = (0, 0) if is_newcomer else (3, 1)
    fault = Fault(rank=rank, step=step, attempt=attempt, place=place)
    assert len(run(2, transport, HOLD, fault, num_newcomers=1, max_ranks=3).finals()) == 2


@of_all([*product(TRANSPORTS)])
def test_a_rank_that_loads_the_end_of_a_step_forgets_who_was_reported_in_it(
    run: Runs, transport: str
) -> None:
    """Or it would wait for the others before the next step, to let in a process that has joined already."""
    fault = Fault(rank=1, step=3, place="averaging", kind="lost connection")
    found = run(2, transport, HOLD, fault, num_newcomers=1, max_ranks=3, training="4 bit")
    assert len(found.finals()) == 3


@of_all([*product(TRANSPORTS)])
def test_a_newcomer_without_the_state_ends_if_all_others_are_lost(run: Runs, transport: str) -> None:
    faults = [Fault(rank=rank, step=3, place="handing over") for rank in (0, 1)]
    [left] = run(2, transport, HOLD, *faults, num_newcomers=1, max_ranks=3).values("left")
    assert (
        "before this process could load their state" in left
        or "no process is left that has the state" in left
    )


@of_all([*product([(), (1,), (0, 2), (0, 1, 2)], TRANSPORTS)])
def test_the_global_batch_stays_the_same(run: Runs, lost: tuple[int, ...], transport: str) -> None:
    """Every step has the samples that it would have without a loss, in an epoch that ends with shorter batches."""
    faults = [Fault(rank=rank, step=3 + rank, place="last bucket") for rank in lost]
    found = run(4, transport, *faults, keeps_global_batch=True)
    assert len(found.finals()) == 4 - len(lost)
    used = elastic.committed_samples(found.notes)
    places = [list(sl.DistributedSampler(Samples(), 4, place, seed=3)) for place in range(4)]
    assert {number: sorted(ids) for number, ids in used.items()} == {
        number: sorted(i for place in places for i in place[(number - 1) * BATCH : number * BATCH])
        for number in range(1, STEPS + 1)
    }
    assert STEPS * 4 * BATCH > SAMPLES


@of_all([*product(TRANSPORTS)])
def test_a_process_that_joins_gets_its_place_in_the_global_batch(run: Runs, transport: str) -> None:
    faults = Fault(rank=1, step=2, place="optimizer"), replace(HOLD, step=4)
    assert len(run(4, transport, *faults, num_newcomers=1, keeps_global_batch=True).finals()) == 4


def settings_are_refused(strategy: Any = None, **settings: Any) -> str:
    ddp = sl.DistributedDataParallel(elastic.Net(), strategy=strategy)
    optimizer, _ = elastic.optimizer_of(ddp.module)
    with pytest.raises(ValueError, match="expect") as refused:
        sl.steps(sl.TrainState(model=ddp, optimizer=optimizer), 1, **settings)
    return str(refused.value)


def test_a_global_batch_that_cannot_stay_the_same_is_refused() -> None:
    assert "expects data to be a DataLoader" in settings_are_refused(keep_global_batch=True)
    refused = settings_are_refused(sl.LocalSGD(3), keep_global_batch=True)
    assert "keep_global_batch=True expects strategy=sl.EveryStep(), got strategy=LocalSGD" in refused
    assert "expects max_ranks to be at most 1" in settings_are_refused(keep_global_batch=True, max_ranks=2)
    assert "max_ranks" in settings_are_refused(min_ranks=3, max_ranks=2)


@pytest.mark.ranks(2)
def test_spare_ranks_are_refused_with_a_sharded_optimizer() -> None:
    ddp = sl.DistributedDataParallel(elastic.Net(), sharded=True)
    state = sl.TrainState(model=ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.5))
    with pytest.raises(ValueError, match="a spare rank has no shards"):
        sl.steps(state, 1, max_ranks=1)
