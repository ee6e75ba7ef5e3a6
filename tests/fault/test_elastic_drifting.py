"""Ranks that are lost in `sl.steps` under strategies that let replicas drift."""

from __future__ import annotations

from pathlib import Path

import drifting
import elastic
import pytest
from elastic import CONNECTING, Fault, Plan

from syncline.testing import RankPool


def run(folder: Path, pool: RankPool, training: str, transport: str, *faults: Fault, size: int = 3) -> int:
    """Return how many processes have finished, all with the right weights."""
    store = elastic.held_store()
    plan = Plan(size=size, transport=transport, faults=faults, port=store.port, training=training, steps=18)
    notes = elastic.run(plan, str(folder), pool)
    return len(drifting.check(plan, notes, has_reference=training in ("LocalSGD", "DiLoCo")))


PLACES = [
    (4, "forward"), (5, "optimizer"), (6, "after optimizer"), (6, "sync"), (6, "confirmed"), (7, "forward")
]  # fmt: skip
"""A step and a place. Replicas sync after every third step."""

FAST = {
    ("shm", "LocalSGD", 0, 6, "sync"),
    ("c10d", "LocalSGD", 0, 4, "forward"),
    ("shm", "DiLoCo", 0, 6, "confirmed"),
    ("c10d", "DiLoCo", 1, 5, "optimizer"),
}

CASES = [
    (transport, training, rank, step, place)
    for transport in ("shm", "c10d")
    for training in ("LocalSGD", "DiLoCo", "streaming")
    for rank in (0, 1)
    for step, place in PLACES
]


@pytest.mark.parametrize(
    ("transport", "training", "rank", "step", "place"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.real]) for case in CASES],
)
def test_a_rank_that_is_killed(
    transport: str, training: str, rank: int, step: int, place: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    step += training == "streaming"  # it syncs after every second step, from step 3 on
    assert run(tmp_path, rank_pool, training, transport, Fault(rank=rank, step=step, place=place)) == 2


@pytest.mark.real
@pytest.mark.parametrize("training", ["LocalSGD", "DiLoCo", "streaming"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("place", ["forward", "sync", "confirmed"])
def test_a_rank_whose_connection_fails(
    place: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """It may have the result of a sync without its confirmation, which others have. All train on."""
    step = 7 if training == "streaming" else 6
    fault = Fault(rank=1, step=step, place=place, kind="lost connection")
    assert run(tmp_path, rank_pool, training, transport, fault) == 3


@pytest.mark.real
@pytest.mark.parametrize("training", ["LocalSGD", "DiLoCo", "streaming", "Gossip", "ParameterServer"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("step", [5, 6])
def test_a_connection_that_fails_in_a_hook_after_the_step(
    step: int, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The rank has made the step, but not what the strategy does after it."""
    fault = Fault(rank=1, step=step, place="after optimizer", kind="lost connection")
    assert run(tmp_path, rank_pool, training, transport, fault) == 3


@pytest.mark.real
@pytest.mark.parametrize("training", ["LocalSGD", "DiLoCo", "streaming"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("second", ["meeting", "opening lanes", "sync", "confirmed"])
def test_two_ranks_one_after_the_other(
    second: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The second one is lost while the ranks connect, or in the sync with which they go on."""
    step = 7 if training == "streaming" else 6
    # Ranks that drift do not wait for each other, so rank 0 may connect anew one or two steps behind rank 3.
    second_step = step - 2 if second in CONNECTING else step
    faults = Fault(rank=3, step=step, place="after optimizer"), Fault(rank=0, step=second_step, place=second)
    assert run(tmp_path, rank_pool, training, transport, *faults, size=4) == 2


@pytest.mark.real
@pytest.mark.parametrize("training", ["Gossip", "ParameterServer"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("place", ["forward", "optimizer", "after optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_strategies_under_which_ranks_never_meet(
    rank: int, place: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    assert run(tmp_path, rank_pool, training, transport, Fault(rank=rank, step=6, place=place)) == 2


@pytest.mark.real
@pytest.mark.parametrize("training", ["warm-up", "groups"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("kind", ["kill", "lost connection"])
@pytest.mark.parametrize("place", ["forward", "last bucket", "optimizer", "sync"])
def test_gradients_that_are_averaged_in_some_steps_or_groups(
    place: str, kind: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """In a warm-up, a rank that has missed a step loads it. In the groups of hosts, all ranks here are one group."""
    step = 10 if (training, place) == ("warm-up", "sync") else 6
    fault = Fault(rank=1, step=step, place=place, kind=kind)
    assert run(tmp_path, rank_pool, training, transport, fault) == (2 if kind == "kill" else 3)
