"""`syncline run --resilient`: what the launcher does when a rank is lost in `sl.steps`, before it and after it."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
    assert "step 3: rank 1 of 3 was lost, and the other ranks repeat the step, now as 2" in done.stderr
    assert "made 4 steps as rank 0 of 2, RANK=0" in done.stdout
    assert "made 4 steps as rank 1 of 2, RANK=1" in done.stdout


def test_without_the_option_the_job_fails(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "inside").returncode == 137


def test_a_rank_that_is_lost_before_the_loop_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "before", "--resilient").returncode == 137


def test_a_rank_that_fails_after_the_loop_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    assert run(tmp_path, forks, "after", "--resilient").returncode == 3
