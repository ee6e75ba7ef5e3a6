"""`syncline run --resilient`: what the launcher does when a rank is lost in `sl.steps`, before it and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_signals import assert_gone

from forks import Forks

PROGRAM = """
import os, signal, sys
import torch
import syncline as sl

when = sys.argv[1]
sl.init()
first = sl.world().rank
if when == "before" and first == 1:
    os.kill(os.getpid(), signal.SIGKILL)
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
state = sl.TrainState(model=ddp, optimizer=optimizer)
for step in sl.steps(state, until=4):
    with step:
        optimizer.zero_grad()
        if when == "inside" and (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.full((4, 2), float(first))).square().mean().backward()
        optimizer.step()
print(f"made {state.step} steps as rank {sl.world().rank} of {sl.world().size}, RANK={os.environ['RANK']}")
if when == "after" and first == 1:
    sys.exit(3)
"""


JOINS = """
import os, signal
import torch
import syncline as sl
from syncline import environment

joins = environment.joins_running_job()
first = sl.init().rank
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
state = sl.TrainState(model=ddp, optimizer=optimizer)
sizes = []
for step in sl.steps(state, until=1_000_000):
    with step:
        optimizer.zero_grad()
        if not joins and (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.full((4, 2), 1.0)).mean().backward()
        optimizer.step()
    if sl.world().size not in sizes[-1:]:
        sizes.append(sl.world().size)
        begin = step.number
    if (joins or len(sizes) == 3) and step.number == begin + 3:
        break
weights = [parameter.tolist() for parameter in ddp.parameters()]
print(f"{sl.world().rank} of {sl.world().size}, {joins=}, {sizes}, step {state.step}: {weights}")
sl.shutdown()
"""

OUTLIVES = """
import os, signal, sys, time
from syncline import environment

if environment.joins_running_job():
    print(os.getpid(), "starts", flush=True)
    time.sleep(600)

import torch
import syncline as sl
from syncline.resilience.group import Group

when, agree = sys.argv[1], Group.agree

def say_and_agree(*arguments):
    print(os.getpid(), "agrees", flush=True)
    return agree(*arguments)

Group.agree = say_and_agree
first = sl.init().rank
print(os.getpid(), "is there", flush=True)
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
state = sl.TrainState(model=ddp, optimizer=optimizer)
for step in sl.steps(state, until=1_000_000, patience=600.0):
    with step:
        if (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGSTOP if when == "agrees" else signal.SIGKILL)
        optimizer.zero_grad()
        ddp(torch.full((4, 2), float(first))).square().mean().backward()
        optimizer.step()
    if step.number == 10:
        print(os.getpid(), "trains on", flush=True)
"""


def run(folder: Path, forks: Forks, when: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return forks.launch(folder, *options, "-n", "3", "program.py", when, warm_ranks=True).wait()


def test_the_others_train_on_and_the_job_succeeds(tmp_path: Path, forks: Forks) -> None:
    done = run(tmp_path, forks, "inside", "--resilient")
    assert done.returncode == 0, done.stderr
    assert "local rank 1 (pid " in done.stderr
    assert (
        "was killed by SIGKILL (signal 9), exit code 137; the other ranks train on without it" in done.stderr
    )
    assert "step 3: rank 1 of 3 was lost; the ranks, now 2, repeat the step (after" in done.stderr
    assert "made 4 steps as rank 0 of 2, RANK=0" in done.stdout
    assert "made 4 steps as rank 1 of 2, RANK=1" in done.stdout


def test_without_the_option_the_job_fails(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "inside").returncode == 137


def test_a_rank_that_is_lost_before_the_loop_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "before", "--resilient").returncode == 137


def test_a_rank_that_fails_after_the_loop_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "after", "--resilient").returncode == 3


def test_a_rank_that_is_started_again_joins_the_others(tmp_path: Path, forks: Forks) -> None:
    """It is the last rank, and it has their state. No step of the others is lost."""
    (tmp_path / "program.py").write_text(JOINS)
    options = ("--resilient", "--max-restarts", "1", "-n", "3")
    done = forks.launch(tmp_path, *options, "program.py", warm_ranks=True).wait()
    assert done.returncode == 0, done.stderr
    assert "the other ranks train on, and it is started again, to join them" in done.stderr
    assert "1 process joined; the ranks, now 3, continue" in done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    starts = ["0 of 3, joins=False, [3, 2, 3]", "1 of 3, joins=False, [3, 2, 3]", "2 of 3, joins=True, [3]"]
    assert [line.partition(", step")[0] for line in sorted(lines)] == starts
    assert len({line.partition(", step")[2] for line in lines}) == 1, lines


@pytest.mark.slow
@pytest.mark.parametrize(("when", "num_lines"), [("trains on", 2), ("agrees", 2), ("starts", 1)])
def test_no_rank_outlives_its_launcher(tmp_path: Path, forks: Forks, when: str, num_lines: int) -> None:
    """Survivors that train on; survivors that wait for a stopped rank; and a rank that is being started again."""
    (tmp_path / "program.py").write_text(OUTLIVES)
    restarts = ("--max-restarts", "1") if when == "starts" else ()
    options = ("--resilient", *restarts, "-n", "3", "--log-line-prefix-template", ":")
    launcher = forks.launch(tmp_path, *options, "program.py", when, warm_ranks=True)
    deadline = time.monotonic() + 60
    while launcher.output().count(when) < num_lines:
        assert time.monotonic() < deadline, launcher.output() + launcher.error()
        time.sleep(0.005)
    pids = {int(line.strip(": ").split()[0]) for line in launcher.output().splitlines()}
    assert len(pids) == 3 + (when == "starts")
    os.kill(launcher.pid, signal.SIGKILL)
    assert_gone([*pids])
    launcher.wait()
