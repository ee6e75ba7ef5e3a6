"""Ranks that are lost in `sl.steps`, at every place: the others train on, and every step and sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import elastic
import pytest
from elastic import PLACES, Fault, Plan, Slow

import syncline as sl
from failure_rows import record
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
    return [one if one in fast else pytest.param(one, marks=pytest.mark.real) for one in values]


places = pytest.mark.parametrize("place", mostly_slow(*PLACES, fast=("last bucket", "optimizer")))
both_transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


@both_transports
@pytest.mark.parametrize("rank", mostly_slow(0, 1, fast=(0,)))
@places
def test_a_rank_that_is_killed_costs_the_step(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    assert num_finished(tmp_path, rank_pool, 3, transport, Fault(rank=rank, step=3, place=place)) == 2


@pytest.mark.real
@both_transports
def test_one_rank_of_two_trains_on(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    assert num_finished(tmp_path, rank_pool, 2, transport, Fault(rank=0, step=3, place="last bucket")) == 1


@pytest.mark.real
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
@pytest.mark.parametrize("rank", mostly_slow(0, 1, fast=(1,)))
@pytest.mark.parametrize("place", mostly_slow(*PLACES, fast=("forward",)))
def test_a_slow_rank_is_not_lost(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=4, place=place, kind="slow")
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


@pytest.mark.real
@both_transports
@pytest.mark.parametrize(("place", "rank"), [("handing over", 0), ("loading", 1)])
def test_a_rank_that_is_lost_while_the_state_is_handed_over(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    first = Fault(rank=1, step=4, place="optimizer", kind="lost connection")
    second = Fault(rank=rank, step=4, place=place)
    assert num_finished(tmp_path, rank_pool, 3, transport, first, second) == 2


@pytest.mark.real
@both_transports
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_stopped_rank_is_left_behind_and_may_not_come_back(
    place: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=4, place=place, kind="stop")
    notes = run(tmp_path, rank_pool, 3, transport, fault, patience_seconds=0.5)
    assert len(elastic.check(notes)) == 2
    [left] = [line["left"] for lines in notes for line in lines if "left" in line]
    assert "without this process" in left


@pytest.mark.real
@both_transports
def test_a_stopped_rank_is_noticed_long_before_the_timeout(
    transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=1, step=4, place="forward", kind="stop")
    long = elastic.LONG_SECONDS  # the pool would end the ranks long before
    notes = run(tmp_path, rank_pool, 3, transport, fault, timeout_seconds=long, patience_seconds=0.5)
    assert len(elastic.check(notes)) == 2


@both_transports
def test_too_few_ranks_end_with_the_reason(transport: str, tmp_path: Path, rank_pool: RankPool) -> None:
    fault = Fault(rank=1, step=4, place="first bucket")
    notes = run(tmp_path, rank_pool, 3, transport, fault, min_ranks=3)
    lefts = [line["left"] for lines in notes for line in lines if "left" in line]
    assert len(lefts) == 2
    assert all(
        "expected at least 3 ranks (min_ranks), but only" in text and "rank 1" in text for text in lefts
    )


@both_transports
@pytest.mark.parametrize("rank", mostly_slow(0, 1, fast=(1,)))
@pytest.mark.parametrize("phase", mostly_slow("data", "forward", fast=("data",)))
def test_a_slow_rank_is_left_behind(
    phase: str, rank: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The others have its times of steps 2 to 6, and make steps 7 and 8 without it. No step is repeated."""
    slow = Slow(rank=rank, phase=phase)
    notes = run(tmp_path, rank_pool, 3, transport, slow=slow, on_straggler="evict")
    finals = elastic.check(notes)
    assert len(finals) == 2
    assert all(final["stragglers"] == [[rank, phase, 6]] for final in finals)
    left = notes[rank][-1]["left"]
    assert 'because on_straggler="evict": step 6: ' in left
    assert f"rank {rank} is slow: over the last 5 steps, its " in left
    assert "took 50.0 ms a step, the median of the ranks is 10.0 ms; all ranks wait 40.0 ms a step" in left
    begun = [[line["step"] for line in lines if "step" in line] for lines in notes]
    assert begun == [[*range(1, 7)] if one == rank else [*range(1, 9)] for one in range(3)]


@both_transports
@pytest.mark.parametrize(
    ("on_straggler", "min_ranks", "num_warnings"),
    [
        ("warn", 1, 1),
        *(pytest.param(*one, marks=pytest.mark.real) for one in (("evict", 2, 1), (None, 1, 0))),
    ],
)
def test_a_slow_rank_stays_if_it_must(
    on_straggler: str | None,
    min_ranks: int,
    num_warnings: int,
    transport: str,
    tmp_path: Path,
    rank_pool: RankPool,
) -> None:
    notes = run(
        tmp_path,
        rank_pool,
        2,
        transport,
        slow=Slow(rank=1, phase="forward"),
        on_straggler=on_straggler,
        min_ranks=min_ranks,
    )
    finals = elastic.check(notes)
    assert [final["stragglers"] for final in finals] == [[[1, "forward", 6]]] * 2
    warned = [[text for text in final["warned"] if "rank 1 is slow" in text] for final in finals]
    assert [len(texts) for texts in warned] == [num_warnings, 0]
    for text in warned[0]:
        record("slow", transport, f"RuntimeWarning: {text}")


@pytest.mark.real
@both_transports
@pytest.mark.parametrize("place", ["last bucket", "optimizer", "averaging"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_is_lost_in_the_step_after_which_a_slow_one_would_leave(
    lost: int, place: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The slow rank leaves or stays, but the others agree, and there are at least two that finish."""
    notes = run(
        tmp_path,
        rank_pool,
        4,
        transport,
        Fault(rank=lost, step=6, place=place),
        slow=Slow(rank=2, phase="data"),
        on_straggler="evict",
    )
    finals = elastic.check(notes)
    assert len(finals) == (3 if lost == 2 else 2 if "left" in notes[2][-1] else 3)


@both_transports
@pytest.mark.parametrize(
    "lost",
    mostly_slow(
        *((place, "kill", rank) for place in ("saving", "writing") for rank in (0, 1)),
        ("committing", "kill", 0),
        *(
            ("before saving", kind, rank)
            for kind in ("kill", "exception", "lost connection")
            for rank in (0, 1)
        ),
        fast=(("writing", "kill", 0),),
    ),
)
@pytest.mark.parametrize("is_blocking", mostly_slow(True, False, fast=(True,)))
def test_a_rank_that_is_lost_in_a_save(
    is_blocking: bool, lost: tuple[str, str, int], transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """The others save again with the group that is left, and the newest save is that of the last step but one."""
    place, kind, rank = lost
    folder = tmp_path / "notes"
    folder.mkdir()
    store = elastic.held_store()
    plan = Plan(
        size=3,
        transport=transport,
        faults=(Fault(rank=rank, step=4, place=place, kind=kind),),
        port=store.port,
        saves=str(tmp_path / "saves"),
        is_blocking=is_blocking,
    )
    notes = elastic.run(plan, str(folder), rank_pool)
    assert len(elastic.check(notes)) >= 2
    elastic.check_last_save(plan, notes)


@pytest.mark.real
@both_transports
@pytest.mark.parametrize("asked", [0, 2])
def test_a_group_that_became_smaller_stops_together(
    asked: int, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    notes = run(
        tmp_path,
        rank_pool,
        3,
        transport,
        Fault(rank=1, step=4, place="optimizer"),
        saves=str(tmp_path / "saves"),
        asked_to_stop=asked,
    )
    assert [lines[-1].get("ended") for lines in notes] == [sl.EXIT_STOPPED, None, sl.EXIT_STOPPED]
    last = [max(line.get("stepped", 0) for line in lines) for lines in notes]
    assert last[0] == last[2]
    assert last[0] == 6, "asked before step 6, whose gradients carry the request"
    assert [save.name for save in (tmp_path / "saves").iterdir()] == [f"save-000001-step-{last[0]}"]


@pytest.mark.real
@both_transports
@pytest.mark.parametrize("kind", ["kill", "exception"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_before_the_loop_ends_the_others_by_name(
    rank: int, kind: str, transport: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    fault = Fault(rank=rank, step=0, place="construction", kind=kind, attempt=0)
    notes = run(tmp_path, rank_pool, 3, transport, fault)
    for one in {0, 1, 2} - {rank}:
        assert f"rank {rank}" in notes[one][-1]["left"], notes
