"""Ranks that are lost in `sl.steps` while compressed gradients are sent: what the compression keeps between steps."""

from __future__ import annotations

from pathlib import Path

import elastic
import pytest
from elastic import Fault, Plan

from syncline.testing import RankPool

trainings = pytest.mark.parametrize("training", ["PowerSGD", "4 bit"])
transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


def run(folder: Path, pool: RankPool, training: str, transport: str, *faults: Fault) -> tuple[int, str]:
    """Return how many processes have finished, and the digest of their weights."""
    folder.mkdir()
    store = elastic.held_store()
    plan = Plan(size=3, transport=transport, faults=faults, port=store.port, training=training)
    finals = elastic.check_ends(
        elastic.run(plan, str(folder), pool), elastic.STEPS, num_forwards=elastic.STEPS
    )
    return len(finals), finals[0]["weights"]


@pytest.mark.parametrize(
    ("transport", "training"),
    [
        pytest.param(transport, training, marks=[] if is_fast else pytest.mark.real)
        for transport, training, is_fast in (
            ("shm", "PowerSGD", False),
            ("c10d", "4 bit", True),
            ("shm", "4 bit", False),
            ("c10d", "PowerSGD", False),
        )
    ],
)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.real)])
def test_an_interrupted_attempt_leaves_no_trace(
    rank: int, training: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Residuals are those of the last step that stands, whether buckets of the attempt were averaged or not."""
    before = run(tmp_path / "a", rank_pool, training, transport, Fault(rank=rank, step=4, place="forward"))
    after = run(tmp_path / "b", rank_pool, training, transport, Fault(rank=rank, step=4, place="last bucket"))
    assert before == after
    assert before[0] == 2


@pytest.mark.real
@trainings
@transports
@pytest.mark.parametrize("place", ["first bucket", "optimizer", "after optimizer", "averaging"])
def test_a_rank_that_is_killed(
    place: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=0, step=4, place=place)
    assert run(tmp_path / "a", rank_pool, training, transport, fault)[0] == 2


@pytest.mark.real
@trainings
@transports
@pytest.mark.parametrize("place", ["last bucket", "optimizer"])
def test_a_rank_that_has_missed_the_step_keeps_its_residuals(
    place: str, transport: str, training: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """It loads the factors of PowerSGD, which must be equal on all ranks."""
    fault = Fault(rank=1, step=4, place=place, kind="lost connection")
    assert run(tmp_path / "a", rank_pool, training, transport, fault)[0] == 3
