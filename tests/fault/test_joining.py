"""Processes that join ranks which train in `sl.steps`, spare ranks, and a global batch that stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import elastic
import pytest
import torch
from elastic import BATCH, SAMPLES, STEPS, Fault, Samples
from test_elastic import both_transports, mostly_slow, run

import syncline as sl
from syncline.testing import RankPool

HOLD = Fault(rank=0, step=3, place="forward", kind="await newcomers")
"""Rank 0 waits until the newcomers have asked to join."""

JOINED = [training for training in elastic.TRAININGS if training != "sharded"]
"""The trainings that a process can join."""


@both_transports
@pytest.mark.parametrize("num_newcomers", mostly_slow(1, 2, fast=(1,)))
def test_newcomers_get_the_state_and_train_with_the_others(
    num_newcomers: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """All join after the step in which they were seen. No step is made twice."""
    size = 2 + num_newcomers
    notes = run(tmp_path, rank_pool, 2, transport, HOLD, num_newcomers=num_newcomers, max_ranks=size)
    assert len(elastic.check(notes)) == size
    for lines in notes[2:]:
        assert [line["step"] for line in lines if "step" in line] == [*range(4, STEPS + 1)]
    for lines in notes[:2]:
        assert [line["step"] for line in lines if "step" in line] == [*range(1, STEPS + 1)]


@both_transports
@pytest.mark.parametrize("keeps", mostly_slow(0, 1, fast=(1,)))
def test_a_rank_keeps_its_gradients_while_another_joins(
    keeps: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    notes = run(tmp_path, rank_pool, 2, transport, HOLD, num_newcomers=1, max_ranks=3, keeps_gradients=keeps)
    assert len(elastic.check(notes)) == 3


@both_transports
@pytest.mark.parametrize("lost", mostly_slow(0, 1, fast=(1,)))
def test_a_process_that_waits_takes_the_place_of_a_lost_rank(
    lost: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    faults = HOLD, Fault(rank=lost, step=3, place="last bucket")
    notes = run(tmp_path, rank_pool, 3, transport, *faults, num_newcomers=1)
    assert len(elastic.check(notes)) == 3
    assert [line["step"] for line in notes[3] if "step" in line] == [*range(3, STEPS + 1)]


@both_transports
@pytest.mark.parametrize("training", mostly_slow(*JOINED, fast=("every step", "LocalSGD")))
def test_a_rank_that_is_left_alone_lets_a_process_join(
    training: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """It sends nothing, so it cannot learn of the process from what it receives."""
    # Replicas that drift notice the loss only at their next sync.
    faults = Fault(rank=1, step=2, place="last bucket"), replace(HOLD, step=6)
    notes = run(tmp_path, rank_pool, 2, transport, *faults, num_newcomers=1, training=training)
    assert [line["step"] for line in notes[2] if "step" in line] == [7, 8]
    assert len(elastic.check_ends(notes, STEPS, num_forwards=None)) == 2
    if training == "every step":
        elastic.check(notes)


@both_transports
def test_spare_ranks_wait_until_a_rank_is_lost(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    fault = Fault(rank=1, step=5, place="last bucket")
    notes = run(tmp_path, rank_pool, 3, transport, fault, max_ranks=2)
    assert len(elastic.check(notes)) == 2
    assert [line["step"] for line in notes[2] if "step" in line] == [*range(5, STEPS + 1)]


@both_transports
def test_a_spare_rank_that_is_not_needed_ends_without_an_error(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    notes = run(tmp_path, rank_pool, 3, transport, max_ranks=2)
    assert len(elastic.check(notes)) == 2
    assert [line.get("ended") for line in notes[2]] == [0]


@pytest.mark.real
@both_transports
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("meeting", 2),
        ("connecting", 2),
        ("loading", 2),
        ("handing over", 0),
        ("handing over", 1),
        ("meeting", 0),
    ],
)
def test_a_rank_that_is_lost_while_another_joins(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The newcomer has not got the state yet, so it cannot be the source of it."""
    is_newcomer = rank == 2  # which has not begun a step while it joins
    step, attempt = (0, 0) if is_newcomer else (3, 1)
    fault = Fault(rank=rank, step=step, attempt=attempt, place=place)
    notes = run(tmp_path, rank_pool, 2, transport, HOLD, fault, num_newcomers=1, max_ranks=3)
    assert len(elastic.check(notes)) == 2


@both_transports
@pytest.mark.parametrize("training", mostly_slow("PowerSGD", "4 bit", fast=("4 bit",)))
def test_newcomers_join_under_a_compression(
    training: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """They lay out their buckets in the order that the others have learnt, although they get the hook later."""
    notes = run(tmp_path, rank_pool, 2, transport, HOLD, num_newcomers=1, max_ranks=3, training=training)
    assert len(elastic.check_ends(notes, STEPS, num_forwards=STEPS)) == 3


@both_transports
def test_a_rank_that_loads_the_end_of_a_step_forgets_who_was_reported_in_it(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Or it would wait for the others before the next step, to let in a process that has joined already."""
    fault = Fault(rank=1, step=3, place="averaging", kind="lost connection")
    notes = run(
        tmp_path, rank_pool, 2, transport, HOLD, fault, num_newcomers=1, max_ranks=3, training="4 bit"
    )
    assert len(elastic.check_ends(notes, STEPS, num_forwards=STEPS)) == 3


@pytest.mark.real
@both_transports
def test_a_newcomer_without_the_state_ends_if_all_others_are_lost(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    faults = [Fault(rank=rank, step=3, place="handing over") for rank in (0, 1)]
    notes = run(tmp_path, rank_pool, 2, transport, HOLD, *faults, num_newcomers=1, max_ranks=3)
    [left] = [line["left"] for lines in notes for line in lines if "left" in line]
    assert (
        "before this process could load their state" in left
        or "no process is left that has the state" in left
    )


@both_transports
@pytest.mark.parametrize("lost", mostly_slow((), (1,), (0, 2), (0, 1, 2), fast=((1,), (0, 1, 2))))
def test_the_global_batch_stays_the_same(
    lost: tuple[int, ...], transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Every step has the samples that it would have without a loss, in an epoch that ends with shorter batches."""
    faults = [Fault(rank=rank, step=3 + rank, place="last bucket") for rank in lost]
    notes = run(tmp_path, rank_pool, 4, transport, *faults, keeps_global_batch=True)
    assert len(elastic.check(notes, takes_mean=True)) == 4 - len(lost)
    used = elastic.committed_samples(notes)
    places = [list(sl.DistributedSampler(Samples(), 4, place, seed=3)) for place in range(4)]
    assert {number: sorted(ids) for number, ids in used.items()} == {
        number: sorted(i for place in places for i in place[(number - 1) * BATCH : number * BATCH])
        for number in range(1, STEPS + 1)
    }
    assert STEPS * 4 * BATCH > SAMPLES


@pytest.mark.real
@both_transports
def test_a_process_that_joins_gets_its_place_in_the_global_batch(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    notes = run(
        tmp_path, rank_pool, 4, transport,
        Fault(rank=1, step=2, place="optimizer"), Fault(rank=0, step=4, place="forward", kind="await newcomers"),
        num_newcomers=1, keeps_global_batch=True,
    )  # fmt: skip
    assert len(elastic.check(notes, takes_mean=True)) == 4


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
