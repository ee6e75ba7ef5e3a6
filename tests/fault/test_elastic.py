"""Ranks that are lost in `sl.steps`, at every place: the others train on, and every step and sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import elastic
import pytest
from elastic import PLACES, Fault, Plan

from syncline.testing import RankPool

Notes = list[list[dict[str, Any]]]


def run(folder: Path, pool: RankPool, size: int, transport: str, *faults: Fault, **settings: Any) -> Notes:
    store = elastic.held_store()
    plan = Plan(size=size, transport=transport, faults=faults, port=store.port, **settings)
    return elastic.run(plan, str(folder), pool)


def num_finished(
    folder: Path, pool: RankPool, size: int, transport: str, *faults: Fault, **settings: Any
) -> int:
    """How many processes have finished, all with the right weights."""
    return len(elastic.check(run(folder, pool, size, transport, *faults, **settings)))


def mostly_slow(*values: object, fast: tuple[object, ...]) -> list[object]:
    """Values of a parameter, of which most are left to CI."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in values]


places = pytest.mark.parametrize("place", mostly_slow(*PLACES, fast=("last bucket", "optimizer")))
both_transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


@both_transports
@pytest.mark.parametrize("rank", mostly_slow(0, 1, fast=(0,)))
@places
def test_a_rank_that_is_killed_costs_the_step(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    assert num_finished(tmp_path, rank_pool, 3, transport, Fault(rank=rank, step=3, place=place)) == 2


@pytest.mark.slow
@both_transports
def test_one_rank_of_two_trains_on(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    assert num_finished(tmp_path, rank_pool, 2, transport, Fault(rank=0, step=3, place="last bucket")) == 1


@pytest.mark.slow
@both_transports
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_is_a_loss(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=4, place=place, kind="exception")
    assert num_finished(tmp_path, rank_pool, 3, transport, fault) == 2


@both_transports
@pytest.mark.parametrize("place", mostly_slow(*PLACES, fast=("optimizer",)))
def test_a_rank_whose_connection_fails_loads_what_it_has_missed(
    place: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The others may have made the step; all train on."""
    fault = Fault(rank=1, step=4, place=place, kind="lost connection")
    assert num_finished(tmp_path, rank_pool, 3, transport, fault) == 3


@both_transports
def test_a_slow_rank_is_not_lost(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    fault = Fault(rank=1, step=4, place="forward", kind="slow")
    assert num_finished(tmp_path, rank_pool, 3, transport, fault, patience_seconds=0.1) == 3


@both_transports
@pytest.mark.parametrize("first", mostly_slow("last bucket", "optimizer", "averaging", fast=("last bucket",)))
@pytest.mark.parametrize(
    "second",
    mostly_slow(
        *("agreeing", "meeting", "connecting", "opening lanes", "forward", "averaging"), fast=("meeting",)
    ),
)
def test_two_ranks_one_after_the_other_in_one_step(
    second: str, first: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    faults = Fault(rank=3, step=4, place=first), Fault(rank=0, step=4, place=second)
    if second == "forward":  # of the second attempt
        faults = faults[0], Fault(rank=0, step=4, place=second, attempt=2)
    assert num_finished(tmp_path, rank_pool, 4, transport, *faults) == 2


@both_transports
@pytest.mark.parametrize("lost", mostly_slow((1,), (0,), (0, 2), fast=((0,),)))
def test_a_rank_that_is_lost_at_the_end(
    lost: tuple[int, ...], transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    faults = [Fault(rank=rank, step=elastic.STEPS, place="the end") for rank in lost]
    assert num_finished(tmp_path, rank_pool, 3, transport, *faults) == 3 - len(lost)


@pytest.mark.slow
@both_transports
@pytest.mark.parametrize(("place", "rank"), [("handing over", 0), ("loading", 1)])
def test_a_rank_that_is_lost_while_the_state_is_handed_over(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    first = Fault(rank=1, step=4, place="optimizer", kind="lost connection")
    second = Fault(rank=rank, step=4, place=place)
    assert num_finished(tmp_path, rank_pool, 3, transport, first, second) == 2


@pytest.mark.slow
@both_transports
@pytest.mark.parametrize("rank", mostly_slow(0, 1, fast=(0,)))
def test_a_stopped_rank_is_left_behind_and_may_not_come_back(
    rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=4, place="forward", kind="stop")
    notes = run(tmp_path, rank_pool, 3, transport, fault, timeout_seconds=4.0, patience_seconds=0.5)
    assert len(elastic.check(notes)) == 2
    [left] = [line["left"] for lines in notes for line in lines if "left" in line]
    assert "without this process" in left


@pytest.mark.slow
@both_transports
def test_a_stopped_rank_is_noticed_long_before_the_timeout(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=1, step=4, place="forward", kind="stop")
    notes = run(tmp_path, rank_pool, 3, transport, fault, timeout_seconds=300.0, patience_seconds=0.5)
    assert len(elastic.check(notes)) == 2  # after 60 seconds, the pool would end the ranks


@both_transports
def test_too_few_ranks_end_with_the_reason(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    fault = Fault(rank=1, step=4, place="first bucket")
    notes = run(tmp_path, rank_pool, 3, transport, fault, min_ranks=3)
    lefts = [line["left"] for lines in notes for line in lines if "left" in line]
    assert len(lefts) == 2
    assert all(
        "expected at least 3 ranks (min_ranks), but only" in text and "rank 1" in text for text in lefts
    )
