"""`syncline explain` with real scripts, which know nothing of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from forks import Forks
from syncline.tools.cli import main

Explain = Callable[..., subprocess.CompletedProcess[str]]

TRAINS = """
import argparse, sys
import torch, torch.distributed as dist
from torch import nn
import syncline as sl

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
arguments = parser.parse_args()
{start}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.body(x))
ddp = sl.DistributedDataParallel(Net(), {wrapper})
optimizer = torch.optim.Adam(ddp.parameters(), lr=arguments.lr)
{attach}
try:
    for step in range(1, 1000):
        print("step", step, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        {end}
finally:
    print("cleaned up", arguments.lr)
"""


def program(**changes: str) -> str:
    values = {"start": "sl.init()", "wrapper": "", "attach": "", "end": ""} | changes
    return TRAINS.format(**values)


ATTACHED = "ddp.attach(optimizer)"


@pytest.fixture
def explain(tmp_path: Path, forks: Forks) -> Explain:
    """Writes a program and explains it."""

    def run(
        code: str, *options: str, arguments: tuple[str, ...] = (), warm_ranks: bool = True
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(code)
        line = (*options, "program.py", *arguments)
        return forks.launch(tmp_path, *line, command="explain", warm_ranks=warm_ranks).wait()

    return run


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_script_with_sl_init(explain: Explain) -> None:
    code = program(wrapper="bucket_cap_mb=0.001")
    done = explain(code, "-n", "3", arguments=("--lr", "0.5"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Only rank 0 is shown. The script ends in the next forward, and its `finally` runs.
    assert lines[:5] == ["step 1 0 3", "step 2 0 3", "step 3 0 3", "step 4 0 3", "cleaned up 0.5"]
    text = words(done.stdout)
    assert "Contract: DistributedDataParallel(Net), 3 ranks on 1 host, transport: shared memory" in text
    assert "One step, as recorded on rank 0, step 3" in text
    assert "head.bias, head.weight" in text
    assert "-> bucket 1" in text
    assert "The 3 ranks shared this host" in text
    assert ".grad now holds the mean over 3 ranks" in text
    assert "for the bucket at the end" in text
    picture = text.partition("to its last work")[2]
    rows = ["buffers, ", "forward ", "backward ", "bucket 0", "bucket 1", "wait", "optimizer Adam"]
    for earlier, later in pairwise(rows):
        assert picture.index(earlier) < picture.index(later)
    assert "\x1b" not in done.stdout
    assert done.stderr == "syncline explain: running program.py on 3 ranks, up to step 3\n"


EVALUATES = """
import torch, torch.distributed as dist, syncline as sl
sl.init()
ddp = sl.DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(5):
    ddp(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            ddp(torch.ones(2, 4))
    dist.barrier()
"""


def test_a_rank_may_evaluate_alone_after_the_step(explain: Explain) -> None:
    done = explain(EVALUATES)
    assert (done.returncode, "Step 3 on rank 0" in done.stdout) == (0, True), done.stderr


def test_a_drop_in_under_torch_distributed(explain: Explain) -> None:
    start = """
dist.init_process_group("gloo")
found = [None, None]
dist.all_gather_object(found, {"rank": dist.get_rank()})
assert found == [{"rank": 0}, {"rank": 1}]
"""
    done = explain(program(start=start), "--ascii")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 host" in done.stdout
    assert "optimizer Adam" in done.stdout
    # How long the bar is depends on the machine: one sign at least.
    assert re.search(r"^forward +#", done.stdout, re.MULTILINE)
    assert "# at work" in done.stdout
    assert done.stdout.isascii()


def test_a_later_step_of_a_strategy(explain: Explain) -> None:
    done = explain(program(wrapper="strategy=sl.DiLoCo(6)", attach=ATTACHED))
    assert done.returncode == 0, done.stderr
    text = words(done.stdout)
    for said in ("Step 6 on rank 0", "took the outer step of fragment 0", "next after step 12"):
        assert said in text


@pytest.mark.real
def test_shards_and_compression(explain: Explain) -> None:
    done = explain(program(wrapper="sharded=True", attach=ATTACHED), "--step", "1", "-n", "4")
    assert done.returncode == 0, done.stderr
    assert "sent by reduce_scatter" in done.stdout
    assert "steps its shard (1 of 4)" in words(done.stdout)
    done = explain(program(wrapper="compression=sl.compression.TopK(0.1)"), "--step", "2")
    assert done.returncode == 0, done.stderr
    assert "sent by TopK" in done.stdout
    assert "Step 2 on rank 0" in done.stdout


def test_the_resilient_loop_saves_and_traces_nothing(explain: Explain, tmp_path: Path) -> None:
    code = """
import torch, syncline as sl
sl.init()
sl.trace("trace")
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
state = sl.TrainState(model=ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))
checkpointer = sl.Checkpointer("saves")
checkpointer.load(state)
for step in sl.steps(state, until=50):
    with step:
        ddp(torch.ones(4, 2)).square().mean().backward()
        state.named["optimizer"].step()
    checkpointer.save(state)
"""
    done = explain(code)
    assert done.returncode == 0, done.stderr
    assert "Step 3 on rank 0" in done.stdout
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "saves").exists()


@pytest.mark.real
def test_a_function_that_is_launched(explain: Explain) -> None:
    code = """
import torch, syncline as sl
def train(lr):
    assert sl.init().size == 3
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
    for step in range(9):
        ddp(torch.ones(4, 2)).square().mean().backward()
if __name__ == "__main__":
    sl.launch(train, ranks=2, args=(0.1,))
"""
    done = explain(code, "-n", "3")
    assert done.returncode == 0, done.stderr
    assert "Step 3 on rank 0" in done.stdout


def test_a_script_that_fails(explain: Explain) -> None:
    done = explain(program(end="assert step < 2, 'no luck'"))
    assert done.returncode == 1
    assert done.stderr.count("AssertionError: no luck") == 1
    assert "worker.py" not in done.stderr
    assert "failed with exit code 1" in done.stderr
    assert "Contract" not in done.stdout
    done = explain(program(end="assert step < 2 or not dist.get_rank(), 'no luck on rank 1'"))
    assert done.returncode == 1
    assert done.stderr.count("AssertionError: no luck on rank 1") == 1
    done = explain("import sys; sys.exit(7)")
    assert done.returncode == 7


def test_a_rank_that_fails_after_the_step(explain: Explain) -> None:
    code = """
import pathlib, time, torch, syncline as sl
world, shown = sl.init(), pathlib.Path("shown")
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
try:
    for step in range(4):
        while step == 3 and world.rank == 1:
            assert not shown.exists(), "no batch"
            time.sleep(0.01)
        ddp(torch.ones(1, 2)).sum().backward()
finally:
    shown.touch()
"""
    done = explain(code)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("AssertionError: no batch") == 1
    assert "Contract: DistributedDataParallel(Linear), 2 ranks" in done.stdout


def test_a_script_with_nothing_to_show(explain: Explain) -> None:
    done = explain("print('hello')")
    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert "program.py ended, and no step of a wrapped module was complete" in done.stderr
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
ddp(torch.ones(1, 2)).sum().backward()
"""
    done = explain(code, warm_ranks=False)  # the program's module outlives the program
    assert done.returncode == 1, done.stderr
    assert "replace this class by sl.DistributedDataParallel" in words(done.stderr)


def test_a_script_that_does_not_join(explain: Explain) -> None:
    done = explain("import torch, syncline as sl\nsl.DistributedDataParallel(torch.nn.Linear(1, 1))")
    assert done.returncode == 1
    assert "but it has not joined the other ranks. Call sl.init()" in words(done.stderr)


def test_ctrl_c(tmp_path: Path, forks: Forks) -> None:
    code = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(999)\nfinally:\n    print('cleaned up')\n"
    (tmp_path / "program.py").write_text(code)
    started = forks.launch(tmp_path, "program.py", command="explain", warm_ranks=True)
    started.wait_for_lines(1)
    os.kill(started.pid, signal.SIGINT)
    done = started.wait()
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == "ready\ncleaned up\n"
    assert "Traceback" not in done.stderr


MISTAKES = {
    "": "expected a script: syncline explain SCRIPT",
    "-n 0 x.py": "argument -n: expected a number of ranks from 1 to",
    "-n 9 x.py": "argument -n: expected a number of ranks from 1 to 8 (syncline plan predicts a step of more), got '9'",
    "-n two x.py": "argument -n: expected a number of ranks from 1 to",
    "--step 0 x.py": "argument --step: expected the number of a step from 1 to",
    "--stop x.py": "unknown option --stop: did you mean --step?",
    "no_such_script.py": "there is no script no_such_script.py",
    "-m no_such_module": "there is no module 'no_such_module'",
}


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for line, text in MISTAKES.items():
        assert main(["explain", *line.split()]) == 2, line
        assert text in capsys.readouterr().err, line
