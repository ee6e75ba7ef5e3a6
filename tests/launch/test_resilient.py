"""`syncline run --resilient`: what the launcher does when a rank is lost in `sl.steps`, before it and after it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_signals import assert_gone

from failure_rows import record
from forks import Forks
from support.states import wait_until
from syncline.tools.launch.losses import Losses
from syncline.tools.launch.stopping import Workers

WRAPS = """
import os, signal, sys, time
import torch
import syncline as sl

def wrapped():
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        ddp(torch.full((4, 2), float(first))).square().mean().backward()
        optimizer.step()

    return train, sl.TrainState(model=ddp, optimizer=optimizer)

"""
"""Where programs begin that train by `train()` as the rank `first`."""

PROGRAM = (
    WRAPS
    + """
when = sys.argv[1]
sl.init(timeout=15 if when == "stopped" else 300)
first = sl.world().rank
if when == "before" and first == 1:
    os.kill(os.getpid(), signal.SIGKILL)
train, state = wrapped()
for step in sl.steps(state, until=4, patience=0.5):
    with step:
        if when == "stopped" and (first, step.number) == (1, 3):
            open("stopped", "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if when == "inside" and (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        train()
print(f"made {state.step} steps as rank {sl.world().rank} of {sl.world().size}, RANK={os.environ['RANK']}")
if when == "stopped" and first == 0:
    os.kill(int(open("stopped").read()), signal.SIGCONT)
if when == "after" and first == 1:
    sys.exit(3)
"""
)


JOINS = """
import hashlib, os, signal
import torch
import syncline as sl
from syncline import environment

joins = environment.joins_running_job()
first = sl.init().rank
# More than one bucket, with caps that depend on the number of ranks.
net = torch.nn.Sequential(torch.nn.Linear(2, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))
ddp = sl.DistributedDataParallel(net)
optimizer = torch.optim.SGD(ddp.parameters(), lr=2**-30, momentum=0.5)
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
weights = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in ddp.parameters())).hexdigest()
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


LEAKS = """
import os, sys, time
import torch
import syncline as sl

sl.init(transport=sys.argv[1])
strategy = sl.LocalSGD(3) if sys.argv[2] == "LocalSGD" else sl.EveryStep()
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
ddp = sl.DistributedDataParallel(net, strategy=strategy)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
state = sl.TrainState(model=ddp, optimizer=optimizer)


def held():
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]


for step in sl.steps(state, until=24):
    with step:
        optimizer.zero_grad()
        ddp(torch.full((4, 2), float(sl.world().rank))).square().mean().backward()
        optimizer.step()
        if step.attempt == 1:
            raise sl.PeerLost("simulated")
    if step.is_committed and step.number == 4:
        before = held()
sl.barrier()
deadline = time.monotonic() + 20
while any(now > then + 4 for now, then in zip(held(), before)) and time.monotonic() < deadline:
    time.sleep(0.05)  # threads of former groups end in the background
print("threads and files:", *before, *held())
"""


SLOW = """
import sys
import torch
import syncline as sl
from syncline.gradients import reduction
from syncline.gradients.step_times import StepClock

worked = 0.0

def work(seconds):
    global worked
    worked += seconds

# No time passes but that of `work`, however busy the machine is.
reduction.StepClock = lambda transport: StepClock(transport, lambda: worked + transport.counts.waited_seconds)

class Net(torch.nn.Linear):
    def forward(self, x):
        work(0.080 if slow == "forward" else 0.001)
        return super().forward(x)

def batches():
    while True:
        work(0.080 if slow == "data" else 0.001)
        yield torch.ones(4, 2)

first = sl.init().rank
slow = sys.argv[1] if first == 1 else ""
ddp = sl.DistributedDataParallel(Net(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
state = sl.TrainState(model=ddp, optimizer=optimizer)
num_alone = 0
for step in sl.steps(state, until=1_000_000, data=batches(), on_straggler="evict", straggler_steps=5):
    with step:
        optimizer.zero_grad()
        ddp(step.next_batch()).square().mean().backward()
        optimizer.step()
    num_alone += sl.world().size == 2
    if num_alone == 3:
        break
[straggler] = ddp.statistics().stragglers
print(f"rank {sl.world().rank} of {sl.world().size}: {straggler.rank} {straggler.phase} {step.discarded}")
"""


JOINS_DRIFTING = """
import os, signal, sys
import torch
import syncline as sl
from syncline import environment

joins = environment.joins_running_job()
if joins:
    open("its pid", "w").write(str(os.getpid()))
    os.rename("its pid", "joins")

def is_refused():
    # The launcher has seen the end of the process that was to join the others.
    try:
        os.kill(int(open("joins").read()), 0)
    except FileNotFoundError:
        return False
    except ProcessLookupError:
        return True
    return False

first = sl.init().rank
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1000, 4))
sampler = sl.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
net = torch.nn.Linear(4, 4).requires_grad_(True)
ddp = sl.DistributedDataParallel(net, sharded=True)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
full = False
for step in sl.steps(state, until=1_000_000, data=loader):
    with step:
        [x] = step.next_batch()
        optimizer.zero_grad()
        if not joins and (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        (ddp(x) - 1).square().mean().backward()
        optimizer.step()
        full = full or (sl.world().size == 3 and (joins or step.number > 3)) or is_refused()
        # All ranks agree on the step after which they end.
        ends = step.number % 8 == 0 and sl.all_reduce_(torch.tensor([int(full)])).item() == sl.world().size
    if step.is_committed and ends:
        break
if "sharded" not in sys.argv:
    ddp.sync_parameters_()
weights = [parameter.tolist() for parameter in ddp.parameters()]
print(f"{sl.world().rank} of {sl.world().size}, {joins=}, step {state.step}: {weights}")
sl.shutdown()
"""


FAULTS = (
    WRAPS
    + """
how = sys.argv[1]
first = sl.init(timeout=60).rank
train, state = wrapped()
for step in sl.steps(state, until=8):
    is_due = step.number == 3
    if how == "outside" and is_due and first == 1:
        raise OSError("a file cannot be read")
    with step:
        if how in ("ValueError", "MemoryError") and is_due and first == 1:
            raise {"ValueError": ValueError, "MemoryError": MemoryError}[how](f"in rank {first}")
        if how == "exit" and is_due and first == 1:
            sys.exit(3)
        if how == "again" and is_due and sl.world().rank == sl.world().size - 1:
            raise ValueError(f"in rank {first}")
        if how == "all" and is_due:
            raise ValueError(f"in rank {first}")
        if how == "words" and is_due:
            raise RuntimeError("connection to a database failed")
        train()
    if how == "after" and is_due:
        break
if how == "after" and first == 1:
    raise ValueError("after the loop")
print(f"made {state.step} steps among {sl.world().size}")
"""
)


STOPPED_LAUNCHER = (
    WRAPS
    + """
first = sl.init(transport=sys.argv[1], timeout=30).rank
train, state = wrapped()
for step in sl.steps(state, until=1_000_000):
    with step:
        if (first, step.number) == (1, 3):
            os.kill(os.getppid(), signal.SIGSTOP)
            open("lost", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        train()
    if step.is_committed and step.number == 6:
        break
open(f"done {first}", "w").write(f"{state.step} steps among {sl.world().size}")
"""
)


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


def test_without_the_option_and_outside_of_the_loop_a_lost_rank_is_a_failure(
    tmp_path: Path, forks: Forks
) -> None:
    for when, options, code in (
        ("inside", (), 137),
        ("before", ("--resilient",), 137),
        ("after", ("--resilient",), 3),
    ):
        assert run(tmp_path, forks, when, *options).returncode == code, when


def run_with_faults(folder: Path, forks: Forks, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(FAULTS)
    return forks.launch(folder, "--resilient", "-n", "3", "program.py", how, warm_ranks=True).wait()


def test_an_exception_of_one_rank_is_a_loss(tmp_path: Path, forks: Forks) -> None:
    for how in ("ValueError", "MemoryError", "exit", "outside"):
        done = run_with_faults(tmp_path, forks, how)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("made 8 steps among 2") == 2, how
        code = 3 if how == "exit" else 1
        assert f"failed with exit code {code}; the other ranks train on without it" in done.stderr
        assert "step 3: rank 1 of 3 was lost; the ranks, now 2, repeat the step" in done.stderr


def test_the_same_exception_of_another_rank_in_the_same_step_ends_the_job(
    tmp_path: Path, forks: Forks
) -> None:
    for how, kind in (("again", "ValueError"), ("all", "ValueError"), ("words", "RuntimeError")):
        done = run_with_faults(tmp_path, forks, how)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        said = f"step 3 failed by the same exception on more than one process: {kind} at program.py:"
        assert said in done.stderr, how
        assert "So the program is at fault, and not a process. The job ends" in done.stderr


def test_an_exception_after_a_loop_that_all_have_left_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    done = run_with_faults(tmp_path, forks, "after")
    assert done.returncode == 1, done.stderr
    assert "ValueError: after the loop" in done.stderr
    assert "train on without it" not in done.stderr


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_ranks_agree_while_their_launcher_is_stopped(transport: str, tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "program.py").write_text(STOPPED_LAUNCHER)
    launcher = forks.launch(tmp_path, "--resilient", "-n", "3", "program.py", transport, warm_ranks=True)
    try:
        wait_until(lambda: len([*tmp_path.glob("done *")]) == 2, lambda: launcher.output() + launcher.error())
    finally:
        os.kill(launcher.pid, signal.SIGCONT)
    assert launcher.wait().returncode == 0
    done = [*tmp_path.glob("done *")]
    assert {path.read_text() for path in done} == {"6 steps among 2"}
    seconds = max(path.stat().st_mtime for path in done) - (tmp_path / "lost").stat().st_mtime
    record("stopped launcher", transport, "the others train on", seconds)


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


@pytest.mark.real
def test_changes_of_the_ranks_leave_no_threads_and_no_files_behind(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "program.py").write_text(LEAKS)
    for how in (("shm", "EveryStep"), ("c10d", "EveryStep"), ("shm", "LocalSGD")):
        options = ("--resilient", "-n", "2", "program.py", *how)
        done = forks.launch(tmp_path, *options, warm_ranks=True).wait()
        assert done.returncode == 0, done.stderr
        lines = [line.partition("files: ")[2] for line in done.stdout.splitlines() if "files: " in line]
        assert len(lines) == 2
        for line in lines:
            threads_before, files_before, threads, files = map(int, line.split())
            assert threads <= threads_before + 4, (how, line)
            assert files <= files_before + 4, (how, line)


@pytest.mark.parametrize("phase", ["data", pytest.param("forward", marks=pytest.mark.real)])
def test_a_rank_that_was_slow_is_no_failure_of_the_job(phase: str, tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "program.py").write_text(SLOW)
    done = forks.launch(tmp_path, "--resilient", "-n", "3", "program.py", phase, warm_ranks=True).wait()
    assert done.returncode == 0, done.stderr
    assert "rank 1 is slow: over the last 5 steps, its " in done.stderr
    assert "rank 1 of 3 was slow and is left behind; the ranks, now 2, continue (after" in done.stderr
    assert (
        "[rank 1] syncline.errors.PeerLost: sl.steps ends on this rank: the others train on without it"
        in done.stderr
    )
    assert "failed with exit code 1; the other ranks train on without it" in done.stderr
    assert f"rank 0 of 2: 1 {phase} []" in done.stdout
    assert f"rank 1 of 2: 1 {phase} []" in done.stdout


@pytest.mark.real
def test_a_rank_that_comes_back_too_late_is_no_failure_of_the_job(tmp_path: Path, forks: Forks) -> None:
    done = run(tmp_path, forks, "stopped", "--resilient")
    assert done.returncode == 0, done.stderr
    assert "began generation 1 without this process" in done.stderr
    assert "failed with exit code 1; the other ranks train on without it" in done.stderr


@pytest.mark.real
@pytest.mark.parametrize(("when", "num_lines"), [("trains on", 2), ("agrees", 2), ("starts", 1)])
def test_no_rank_outlives_its_launcher(tmp_path: Path, forks: Forks, when: str, num_lines: int) -> None:
    """Survivors that train on; survivors that wait for a stopped rank; and a rank that is being started again."""
    (tmp_path / "program.py").write_text(OUTLIVES)
    restarts = ("--max-restarts", "1") if when == "starts" else ()
    options = ("--resilient", *restarts, "-n", "3", "--log-line-prefix-template", ":")
    launcher = forks.launch(tmp_path, *options, "program.py", when, warm_ranks=True)
    wait_until(
        lambda: launcher.output().count(when) >= num_lines, lambda: launcher.output() + launcher.error()
    )
    pids = {int(line.strip(": ").split()[0]) for line in launcher.output().splitlines()}
    assert len(pids) == 3 + (when == "starts")
    os.kill(launcher.pid, signal.SIGKILL)
    assert_gone([*pids])
    launcher.wait()


@pytest.mark.real
def test_a_rank_cannot_join_shards_but_the_others_train_on(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "program.py").write_text(JOINS_DRIFTING)
    options = ("--resilient", "--max-restarts", "1", "-n", "3")
    done = forks.launch(tmp_path, *options, "program.py", "sharded", warm_ranks=True).wait()
    assert "with sharded=True, a process cannot join ranks that are training" in done.stderr
    assert done.stdout.count("of 2, joins=False, step ") == 2
    assert done.returncode == 0, done.stderr


def test_a_rank_that_is_lost_during_a_look_is_no_failure() -> None:
    """torch's own look ends all ranks if one has failed. So it is left out while all ranks seem to run."""
    running = SimpleNamespace(proc=SimpleNamespace(pid=1, poll=lambda: None))
    ranks: Any = SimpleNamespace(subprocess_handlers={0: running, 1: running}, error_files=["none"] * 2)

    def look_of_torch(ranks: Any) -> None:
        raise AssertionError("a rank could be lost just now")

    guardian: Any = SimpleNamespace(watch=lambda *_: None)
    losses = Losses(num_restarts=0)
    workers = Workers("mark", guardian, whole_groups=False, note_ended=lambda *_: None, losses=losses)
    assert workers._poll(look_of_torch, ranks) is None
