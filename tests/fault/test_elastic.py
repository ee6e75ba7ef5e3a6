"""Ranks that are lost in `sl.steps`, at every place: the others train on, and every step and sample counts once."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

import elastic
from elastic import CONNECTING, LONG_SECONDS, PLACES, STEPS, Fault, Slow, is_drifting
from elastic_cases import TRANSPORTS, Run, Runs, of_all

import syncline as sl
from failure_rows import record

DRIFTING_STEPS = 18

INSIDE = ("optimizer", "after optimizer", "received")
"""Places at which the others make the step without the lost rank, whose shard may miss it."""

TWO = ("kill", "lost connection")
SETTINGS = {
    "kill": {},
    "exception": {},
    "lost connection": {},
    "slow": {"patience_seconds": 0.1},
    "stop": {"patience_seconds": 0.5, "timeout_seconds": LONG_SECONDS},  # who waits for the timeout hangs
}
"""What can happen to a rank, and the settings of the run."""

NOT_AVERAGED = [place for place in PLACES if place != "verdict"]

FAMILIES = {
    "every step": (["every step"], [(4, place) for place in PLACES], SETTINGS),
    "compressed": (["PowerSGD", "4 bit"], [(4, place) for place in NOT_AVERAGED], TWO),
    "sharded": (["sharded"], [(4, place) for place in (*NOT_AVERAGED, "received")], TWO),
    "drifting": (
        ["LocalSGD", "DiLoCo", "streaming"],  # which sync after every third step
        [
            *((4, "forward"), (5, "optimizer"), (5, "after optimizer"), (6, "after optimizer")),
            *((6, "sync"), (6, "confirmed"), (7, "forward")),
        ],
        TWO,
    ),
    "without syncs": (
        ["Gossip", "ParameterServer"],
        [(6, "forward"), (5, "after optimizer"), (6, "after optimizer"), (6, "optimizer")],
        TWO,
    ),
    "averaging at times": (
        # In a warm-up, a rank that has missed a step loads it. In the groups of hosts, all ranks here are one group.
        ["warm-up", "groups"],
        [(6, place) for place in ("forward", "last bucket", "optimizer", "sync")],
        TWO,
    ),
}
"""Trainings of one kind, the steps and places at which a rank can be lost, and what can happen to it."""

LOSSES = [
    (family, *values)
    for family, (trainings, places, kinds) in FAMILIES.items()
    for values in product(places, kinds, (0, 1), TRANSPORTS, trainings)
]


@of_all(LOSSES, num_paired=5)
def test_whatever_happens_to_a_rank_every_step_and_sample_counts_once(
    run: Runs, family: str, when: tuple[int, str], kind: str, rank: int, transport: str, training: str
) -> None:
    """After a connection has failed, the rank loads what it has missed. After a SIGSTOP, it may not come back."""
    step, place = when
    if training == "streaming":  # it syncs after every second step, from step 3 on
        step += 1
    if (training, place) == ("warm-up", "sync"):
        step = 10
    fault = Fault(rank=rank, step=step, place=place, kind=kind)
    found = run_training(run, 3, transport, training, fault, **SETTINGS[kind])
    finals = found.finals(may_miss=kind == "kill" and place in INSIDE)
    assert len(finals) == (3 if kind in ("slow", "lost connection") else 2)
    lefts = found.values("left")
    assert len(lefts) == (kind == "stop"), lefts
    assert all("without this process" in left for left in lefts)


def run_training(
    run: Runs, size: int, transport: str, training: str, *faults: Fault, **settings: float
) -> Run:
    steps = DRIFTING_STEPS if is_drifting(training) else STEPS
    return run(size, transport, *faults, training=training, steps=steps, **settings)


@of_all([*product(("every step", "sharded"), TRANSPORTS)])
def test_one_rank_of_two_trains_on(run: Runs, training: str, transport: str) -> None:
    fault = Fault(rank=0, step=3, place="last bucket")
    assert len(run(2, transport, fault, training=training).finals()) == 1


@of_all([*product(("PowerSGD", "4 bit"), (0, 1), TRANSPORTS)])
def test_an_interrupted_attempt_leaves_no_trace_in_a_compression(
    run: Runs, training: str, rank: int, transport: str
) -> None:
    """Residuals are those of the last step that stands, whether buckets of the attempt were averaged or not."""
    before, after = (
        run(3, transport, Fault(rank=rank, step=4, place=place), training=training).finals()
        for place in ("forward", "last bucket")
    )
    assert len(before) == len(after) == 2
    assert before[0]["weights"] == after[0]["weights"]


SECOND_LOSSES = [
    *product(
        ["every step"],
        ("agreeing", "meeting", "connecting", "opening lanes", "forward", "averaging"),
        ("last bucket", "optimizer", "averaging"),
        TRANSPORTS,
    ),
    *product(
        ["sharded"],
        ("meeting", "opening lanes", "moving shards", "forward"),
        ("last bucket", "after optimizer"),
        TRANSPORTS,
    ),
    *product(
        ("LocalSGD", "DiLoCo", "streaming"),
        ("meeting", "opening lanes", "sync", "confirmed"),
        ["after optimizer"],
        TRANSPORTS,
    ),
]


@of_all(SECOND_LOSSES)
def test_two_ranks_one_after_the_other(
    run: Runs, training: str, second: str, first: str, transport: str
) -> None:
    """The second one is lost while the ranks connect, in the second attempt, or in the sync with which they go on."""
    step = {"LocalSGD": 6, "DiLoCo": 6, "streaming": 7}.get(training, 4)
    # Ranks that drift do not wait for each other, so rank 0 may connect anew one or two steps behind rank 3.
    second_step = step - 2 if is_drifting(training) and second in CONNECTING else step
    faults = (
        Fault(rank=3, step=step, place=first),
        Fault(rank=0, step=second_step, place=second, attempt=2 if second == "forward" else 1),
    )
    found = run_training(run, 4, transport, training, *faults)
    assert len(found.finals(may_miss=first in INSIDE)) == 2


AFTER_A_FAILED_CONNECTION = [
    *product(["every step"], [("handing over", 0), ("loading", 1)], TRANSPORTS),
    *product(["sharded"], [("opening lanes", 0), ("moving shards", 0)], TRANSPORTS),
]


@of_all(AFTER_A_FAILED_CONNECTION, num_paired=2)
def test_a_rank_that_is_lost_while_another_gets_the_state(
    run: Runs, training: str, second: tuple[str, int], transport: str
) -> None:
    """Rank 1 makes the step of its shard late, while the ranks connect anew: the samples of the step are used."""
    place, rank = second
    faults = (
        Fault(rank=1, step=4, place="optimizer", kind="lost connection"),
        Fault(rank=rank, step=4, place=place),
    )
    assert len(run(3, transport, *faults, training=training).finals(may_miss=True)) == 2


@of_all([*product([(1,), (0,), (0, 2)], TRANSPORTS)])
def test_a_rank_that_is_lost_at_the_end(run: Runs, lost: tuple[int, ...], transport: str) -> None:
    faults = [Fault(rank=rank, step=STEPS, place="the end") for rank in lost]
    assert len(run(3, transport, *faults).finals()) == 3 - len(lost)


@of_all([*product(TRANSPORTS)])
def test_too_few_ranks_end_with_the_reason(run: Runs, transport: str) -> None:
    lefts = run(3, transport, Fault(rank=1, step=4, place="first bucket"), min_ranks=3).values("left")
    assert len(lefts) == 2
    assert all("at least 3 ranks (min_ranks), but only" in text and "rank 1" in text for text in lefts)


@of_all([*product(("kill", "exception"), (0, 1), TRANSPORTS)])
def test_a_rank_that_is_lost_before_the_loop_ends_the_others_by_name(
    run: Runs, kind: str, rank: int, transport: str
) -> None:
    fault = Fault(rank=rank, step=0, place="construction", kind=kind, attempt=0)
    found = run(3, transport, fault)
    for one in {0, 1, 2} - {rank}:
        assert f"rank {rank}" in found.notes[one][-1]["left"], found.notes


# ---------------------------------------------------------------------- slow ranks


@of_all([*product((0, 1), ("data", "forward"), TRANSPORTS)])
def test_a_slow_rank_is_left_behind(run: Runs, rank: int, phase: str, transport: str) -> None:
    """The others have its times of steps 2 to 6, and make steps 7 and 8 without it. No step is repeated."""
    found = run(3, transport, slow=Slow(rank=rank, phase=phase), on_straggler="evict")
    finals = found.finals()
    assert len(finals) == 2
    assert all(final["stragglers"] == [[rank, phase, 6]] for final in finals)
    [left] = found.values("left", rank)
    assert 'because on_straggler="evict": step 6: ' in left
    assert f"rank {rank} is slow: over the last 5 steps, its " in left
    assert "took 50.0 ms a step, the median of the ranks is 10.0 ms; all ranks wait 40.0 ms a step" in left
    for one in range(3):
        assert found.values("step", one) == [*range(1, 7 if one == rank else 9)]


@of_all([*product([("warn", 1, 1), ("evict", 2, 1), (None, 1, 0)], TRANSPORTS)])
def test_a_slow_rank_stays_if_it_must(
    run: Runs, settings: tuple[str | None, int, int], transport: str
) -> None:
    on_straggler, min_ranks, num_warnings = settings
    slow = Slow(rank=1, phase="forward")
    finals = run(2, transport, slow=slow, on_straggler=on_straggler, min_ranks=min_ranks).finals()
    assert [final["stragglers"] for final in finals] == [[[1, "forward", 6]]] * 2
    warned = [[text for text in final["warned"] if "rank 1 is slow" in text] for final in finals]
    assert [len(texts) for texts in warned] == [num_warnings, 0]
    for text in warned[0]:
        record("slow", transport, f"RuntimeWarning: {text}")


@of_all([*product((0, 1, 2), ("last bucket", "optimizer", "averaging"), TRANSPORTS)])
def test_a_rank_is_lost_in_the_step_after_which_a_slow_one_would_leave(
    run: Runs, lost: int, place: str, transport: str
) -> None:
    """The slow rank leaves or stays, but the others agree, and there are at least two that finish."""
    fault, slow = Fault(rank=lost, step=6, place=place), Slow(rank=2, phase="data")
    found = run(4, transport, fault, slow=slow, on_straggler="evict")
    assert len(found.finals()) == (2 if lost != 2 and found.values("left", 2) else 3)


# ---------------------------------------------------------------------- saves

IN_SAVES = [
    *product([("saving", "kill"), ("writing", "kill")], (0, 1), (True, False), TRANSPORTS),
    *product([("committing", "kill")], [0], (True, False), TRANSPORTS),
    *product(
        [("before saving", kind) for kind in ("kill", "exception", "lost connection")],
        (0, 1),
        (True, False),
        TRANSPORTS,
    ),
]


@of_all(IN_SAVES)
def test_a_rank_that_is_lost_in_a_save(
    run: Runs, loss: tuple[str, str], rank: int, is_blocking: bool, transport: str
) -> None:
    """The others save again with the group that is left, and the newest save is that of the last step but one."""
    place, kind = loss
    fault = Fault(rank=rank, step=4, place=place, kind=kind)
    with tempfile.TemporaryDirectory() as saves:
        found = run(3, transport, fault, saves=saves, is_blocking=is_blocking)
        assert len(found.finals()) >= 2
        elastic.check_last_save(found.plan, found.notes)


@of_all([*product((0, 2), TRANSPORTS)])
def test_a_group_that_became_smaller_stops_together(run: Runs, asked: int, transport: str) -> None:
    """After the step before which one is asked, because its gradients carry the request."""
    fault = Fault(rank=1, step=4, place="optimizer")
    with tempfile.TemporaryDirectory() as saves:
        found = run(3, transport, fault, saves=saves, asked_to_stop=asked)
        assert [save.name for save in Path(saves).iterdir()] == ["save-000001-step-6"]
    assert [lines[-1].get("ended") for lines in found.notes] == [sl.EXIT_STOPPED, None, sl.EXIT_STOPPED]
    assert [max(found.values("stepped", rank)) for rank in (0, 2)] == [6, 6]
