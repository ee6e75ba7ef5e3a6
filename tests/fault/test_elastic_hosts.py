"""`sl.steps` on two hosts under `syncline run --resilient`: lost ranks, lost hosts and a cable that is pulled.

The hosts are network namespaces of this machine, joined by a cable of the kernel's. Needs root; skipped otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic import Fault
from elastic_hosts import NUM_ON_A, Job, Training

from support.states import wait_until
from syncline.environment import patience

pytestmark = pytest.mark.real

RANKS_OF = {"a": (0, 1, 2), "b": (3, 4)}


@pytest.fixture
def training(job_of: Callable[[type[Training]], Training]) -> Training:
    return job_of(Training)


@pytest.fixture
def job(job_of: Callable[[type[Job]], Job]) -> Job:
    return job_of(Job)


# ---------------------------------------------------------------------- ranks and hosts are lost


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("place", ["last bucket", "optimizer"])
def test_a_lost_rank_costs_the_step_on_both_hosts(training: Training, rank: int, place: str) -> None:
    """The leader of each host, and another rank."""
    training.begin(Fault(rank=rank, step=3, place=place))
    (code_a, _, err_a), (code_b, _, err_b) = training.wait("a"), training.wait("b")
    assert (code_a, code_b) == (0, 0), err_a + err_b
    assert training.finished() == [one for one in range(5) if one != rank]
    assert "the other ranks train on without it" in (err_a if rank < NUM_ON_A else err_b)


@pytest.mark.parametrize("host", ["a", "b"])
def test_all_ranks_of_a_host_are_lost_and_its_launcher_is_not(training: Training, host: str) -> None:
    """Its launcher records their end, so that nobody waits for them. The one with the store stays as long as needed."""
    training.num_on = {"a": 2, "b": 3} if host == "a" else {"a": 3, "b": 2}
    ranks = {"a": [0, 1], "b": [3, 4]}[host]
    training.begin(*(Fault(rank=rank, step=3, place="last bucket") for rank in ranks), patience_seconds=600.0)
    (code_a, _, err_a), (code_b, _, err_b) = training.wait("a"), training.wait("b")
    assert (code_a, code_b) == ((137, 0) if host == "a" else (0, 137)), err_a + err_b
    assert training.finished() == [one for one in range(5) if one not in ranks]
    # The two end within microseconds of each other: the others see them as one loss or as two.
    assert "the ranks, now 3, repeat the step" in err_a + err_b


def test_a_lost_host_costs_the_step(training: Training) -> None:
    training.begin_and_halt(patience_seconds=1.0)
    training.kill("b")
    training.go_on()
    code, _, err = training.wait("a")
    assert code == 0, err
    assert training.finished() == [0, 1, 2]
    assert "ranks 3, 4 of 5 were lost; the ranks, now 3, repeat the step" in err


def test_without_the_host_of_the_store_all_end_at_once_with_the_reason(training: Training) -> None:
    training.begin_and_halt(patience_seconds=3000.0)  # who waits so long hangs
    training.kill("a")
    training.go_on()
    code, _, err = training.wait("b")
    assert code == 0, err
    for text in training.left(RANKS_OF["b"]):
        assert text.startswith(
            "the launcher's store, through which the processes agree on membership, has ended"
        )


# ---------------------------------------------------------------------- the cable


def test_a_cable_that_is_pulled_for_half_a_second_costs_nothing(training: Training) -> None:
    training.begin_and_halt()
    training.hosts.cut()
    training.go_on()
    time.sleep(0.5)
    training.hosts.mend()
    (code_a, _, err_a), (code_b, _, err_b) = training.wait("a"), training.wait("b")
    assert (code_a, err_a.strip(), code_b, err_b.strip()) == (0, "", 0, "")
    assert training.finished() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_mended", [True, False])
def test_the_side_with_the_majority_and_the_store_trains_on(training: Training, is_mended: bool) -> None:
    training.begin_and_halt(patience_seconds=5.0)
    training.hosts.cut()
    training.go_on()
    if is_mended:
        wait_until(lambda: any(line.get("stepped", 0) > 2 for line in training.notes()[0]), training.notes)
        training.hosts.mend()
    (code, _, err), _ = training.wait("a"), training.wait("b")
    assert code == 0, err
    assert training.finished() == [0, 1, 2]
    assert "ranks 3, 4 of 5 were lost; the ranks, now 3, repeat the step" in err
    for text in training.left(RANKS_OF["b"]):
        assert "has ended or cannot be reached" in text or "without this process" in text, text


def test_with_more_patience_all_ranks_train_on_when_the_cable_is_back(training: Training) -> None:
    training.begin_and_halt(patience_seconds=600.0)
    training.hosts.cut()
    training.go_on()
    time.sleep(patience(10))  # until a rank has noticed
    training.hosts.mend()
    (code_a, _, err_a), (code_b, _, err_b) = training.wait("a"), training.wait("b")
    assert (code_a, code_b) == (0, 0), err_a + err_b
    assert training.finished() == [0, 1, 2, 3, 4]
    assert "a connection was lost; the ranks, now 5, repeat the step" in err_a


def test_the_side_without_the_store_never_trains_on_even_with_the_majority(training: Training) -> None:
    training.num_on = {"a": 2, "b": 3}
    training.begin_and_halt(patience_seconds=1.0)
    training.hosts.cut()
    training.go_on()
    training.wait("a"), training.wait("b")
    assert all("which is not the majority" in text for text in training.left([0, 1]))
    assert all("has ended or cannot be reached" in text for text in training.left([2, 3, 4]))
    assert not any(
        "done" in line or line.get("stepped", 0) > 2 for lines in training.notes() for line in lines
    )


@pytest.mark.parametrize("needs_majority", [True, False])
def test_equal_halves(training: Training, needs_majority: bool) -> None:
    training.num_on = {"a": 2, "b": 2}
    training.begin_and_halt(patience_seconds=1.0, needs_majority=needs_majority)
    training.hosts.cut()
    training.go_on()
    training.wait("a"), training.wait("b")
    assert all("has ended or cannot be reached" in text for text in training.left([2, 3]))
    if needs_majority:
        assert all("which is not the majority" in text for text in training.left([0, 1]))
    else:
        assert training.finished() == [0, 1]


# ---------------------------------------------------------------------- lost processes are started again

JOINS = """
import os, signal, sys
import torch
import syncline as sl
from syncline import environment

victims, size = [int(word) for word in sys.argv[2].split(",")], int(sys.argv[1])
joins = environment.joins_running_job()
first = sl.init().rank
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
state = sl.TrainState(model=ddp, optimizer=optimizer)
has_lost, begin = False, 0
for step in sl.steps(state, until=1_000_000, patience=1.0):
    with step:
        optimizer.zero_grad()
        if not joins and first in victims and step.number == 3:
            print("lost", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.full((4, 2), 1.0)).mean().backward()
        optimizer.step()
    here = sl.world().size
    has_lost = has_lost or bool(step.discarded)
    has_come_back = here == size and (joins or has_lost)
    if has_come_back and not begin:
        begin = step.number
    if has_come_back and step.number >= begin + 3:
        break
weights = [parameter.tolist() for parameter in ddp.parameters()]
print(f"{sl.world().rank} of {sl.world().size}, {joins=}, {sl.world().local_rank=}, step {state.step}: {weights}")
sl.shutdown()
"""


def final_lines(out: str) -> list[str]:
    return sorted(line.partition("] ")[2] for line in out.splitlines() if " of " in line)


def test_a_rank_that_is_alone_on_its_host_is_started_again(job: Job, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOINS)
    for letter, num_ranks in (("a", 2), ("b", 1)):
        job.start(letter, num_ranks, "--max-restarts", 1, program, 3, 2)
    (code_a, out_a, err_a), (code_b, out_b, err_b) = job.wait("a"), job.wait("b")
    assert (code_a, code_b) == (0, 0), err_a + err_b
    assert "it is started again, to join them" in err_b
    lines = final_lines(out_a + out_b)
    assert [line.partition(", step")[0] for line in lines] == [
        "0 of 3, joins=False, sl.world().local_rank=0",
        "1 of 3, joins=False, sl.world().local_rank=1",
        "2 of 3, joins=True, sl.world().local_rank=0",
    ]
    assert len({line.partition(", step")[2] for line in lines}) == 1, lines


def test_a_host_that_is_started_again_joins_the_others(job: Job, tmp_path: Path) -> None:
    """By the command with which it was started first."""
    program = tmp_path / "program.py"
    program.write_text(JOINS)
    for letter, num_ranks in (("a", 3), ("b", 2)):
        job.start(letter, num_ranks, program, 5, "3,4")
    _, lost, _ = job.wait("b")
    assert lost.count("lost") == 2, lost
    job.start("b", 2, program, 5, "3,4")
    (code_a, out_a, err_a), (code_b, out_b, err_b) = job.wait("a"), job.wait("b")
    assert (code_a, code_b) == (0, 0), err_a + err_b
    lines = final_lines(out_a + out_b)
    assert ["joins=True" in line for line in lines] == [False, False, False, True, True], lines
    assert len({line.partition(", step")[2] for line in lines}) == 1, lines
