"""Ranks that are lost in `sl.steps` with `sharded=True`: parameters, and the optimizer's state of the others, stay."""

from __future__ import annotations

from pathlib import Path

import elastic
import pytest
from elastic import Fault, Plan

from syncline.testing import RankPool

transports = pytest.mark.parametrize("transport", ["shm", "c10d"])

BEFORE = ("forward", "first bucket", "last bucket")
"""Places at which no rank has made the step."""

INSIDE = ("optimizer", "after optimizer", "received")
"""Places at which the others make the step without the lost rank, whose shard may miss it."""


def run(
    folder: Path, pool: RankPool, transport: str, *faults: Fault, size: int = 3, may_miss: bool = False
) -> int:
    """Return how many processes have finished, all with the right weights and momenta."""
    store = elastic.held_store()
    plan = Plan(size=size, transport=transport, faults=faults, port=store.port, training="sharded")
    return len(elastic.check(elastic.run(plan, str(folder), pool), may_miss=may_miss))


FAST = {
    ("shm", "after optimizer", 0),
    ("c10d", "after optimizer", 0),
    ("shm", "last bucket", 0),
    ("c10d", "last bucket", 1),
}

CASES = [
    (transport, place, rank)
    for transport in ("shm", "c10d")
    for place in (*BEFORE, *INSIDE, "averaging")
    for rank in (0, 1)
]


@pytest.mark.parametrize(
    ("transport", "place", "rank"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.real]) for case in CASES],
)
def test_a_rank_that_is_killed(
    transport: str, place: str, rank: int, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=4, place=place)
    assert run(tmp_path, rank_pool, transport, fault, may_miss=place in INSIDE) == 2


@pytest.mark.real
@transports
@pytest.mark.parametrize("place", [*BEFORE, *INSIDE])
def test_a_rank_whose_connection_fails_makes_the_step_of_its_shard(
    place: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """No state is lost, because all shards are there."""
    fault = Fault(rank=1, step=4, place=place, kind="lost connection")
    assert run(tmp_path, rank_pool, transport, fault) == 3


@pytest.mark.real
@transports
@pytest.mark.parametrize("second", ["meeting", "opening lanes", "moving shards", "forward"])
@pytest.mark.parametrize("first", ["last bucket", "after optimizer"])
def test_two_ranks_one_after_the_other(
    first: str, second: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    attempt = 2 if second == "forward" else 1
    faults = (
        Fault(rank=3, step=4, place=first), Fault(rank=0, step=4, place=second, attempt=attempt)
    )  # fmt: skip
    assert run(tmp_path, rank_pool, transport, *faults, size=4, may_miss=first in INSIDE) == 2


@pytest.mark.real
@transports
@pytest.mark.parametrize("second", ["opening lanes", "moving shards"])
def test_samples_of_a_step_that_a_rank_makes_late_are_used(
    second: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Rank 1 makes the step of its shard while the ranks connect anew; then another one is lost before it loads."""
    faults = (
        Fault(rank=1, step=4, place="optimizer", kind="lost connection"),
        Fault(rank=0, step=4, place=second),
    )
    assert run(tmp_path, rank_pool, transport, *faults, may_miss=True) == 2


@pytest.mark.real
@transports
def test_one_rank_of_two_trains_on(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    assert run(tmp_path, rank_pool, transport, Fault(rank=0, step=4, place="last bucket"), size=2) == 1
