"""`syncline doctor` with real ranks: scripts that know nothing of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forks import Forks
from syncline.tools.cli import main
from syncline.tools.doctor.host import findings

Doctor = Callable[..., subprocess.CompletedProcess[str]]

TRAINS = """
import itertools, sys
import torch, torch.distributed as dist
from torch import nn
import syncline as sl

class Part(nn.Module):
    numbers = itertools.count()
    def forward(self, x):
        return x {noise}

{start}
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), Part(), nn.Dropout(), nn.Linear(8, 2))
ddp = {wrapper}(net)
torch.manual_seed({seed})
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 * (1 + {rank_counts} * rank))
net.eval()
with torch.no_grad():
    ddp(torch.zeros(1, 3))
net.train()
for step in range(3):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + {batch}))
    optimizer.zero_grad()
    loss = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
{end}
dist.destroy_process_group()
"""


def program(**changes: str) -> str:
    values = {
        "noise": "",
        "start": "dist.init_process_group('gloo')",
        "wrapper": "torch.nn.parallel.DistributedDataParallel",
        "seed": "rank",
        "batch": "rank",
        "rank_counts": "0",
        "end": "",
    } | changes
    return TRAINS.format(**values)


OURS = {
    "wrapper": "sl.DistributedDataParallel",
    "start": "sl.init(device='cpu')",
    "end": "sl.shutdown(); sys.exit()",
}


@pytest.fixture
def doctor(tmp_path: Path, forks: Forks) -> Doctor:
    """Writes a program and examines it on two processes."""

    def examine(
        code: str, *options: str, command: str = "doctor", warm_ranks: bool = True
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(code)
        arguments = ("-n", "2", *options, "program.py")
        return forks.launch(tmp_path, *arguments, command=command, warm_ranks=warm_ranks).wait()

    return examine


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_script_that_is_fine(doctor: Doctor) -> None:
    done = doctor(program(**OURS))
    assert done.returncode == 0, done.stderr
    text = words(done.stdout)
    assert "syncline doctor: forward 1 of DistributedDataParallel(Sequential): 2 ranks, all agrees" in text
    assert (
        "with rank 0's buffers and inputs and the same random numbers: parameters, calls, outputs and gradients"
        in text
    )
    assert "random numbers are drawn, as in dropout. Each rank draws its own" in text
    assert "Contract: DistributedDataParallel" in text
    assert "step 0" not in text  # it ended before its first step


@pytest.mark.real
def test_a_wrapper_that_is_compiled(doctor: Doctor) -> None:
    for wrapper in ("torch.nn.parallel.DistributedDataParallel", "sl.DistributedDataParallel"):
        done = doctor(program(wrapper=f"(lambda net: torch.compile({wrapper}(net), backend='eager'))"))
        assert done.returncode == 0, done.stderr
        text = words(done.stdout)
        assert "forward 1 of DistributedDataParallel(Sequential): 2 ranks, all agrees" in text
        assert "6 calls of 6 modules" in text  # as they are written, for compiled code does not call them


def test_what_all_ranks_have_found_is_said_once(doctor: Doctor) -> None:
    done = doctor(program(noise="+ next(self.numbers)"))
    assert done.returncode == 1, done.stderr
    text = words(done.stdout)
    assert "2 ranks, 1 disagreement 1. ranks 0, 1, two runs from the same state: 2 (Part) returns" in text
    assert text.count("global counter") == 1


def test_the_same_batch_and_the_same_seed_are_said(doctor: Doctor) -> None:
    another = "other = torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))"
    done = doctor(program(batch="0", seed="0", start=f"dist.init_process_group('gloo'); {another}"))
    assert done.returncode == 0, done.stderr
    text = words(done.stdout)
    assert "2 ranks, no disagreement, but all ranks were given the same batch (see notes) checked" in text
    assert "all agrees" not in text
    assert "- all ranks were given the same batch. In data-parallel training" in text
    assert "is the sampler distributed" in text
    assert "All ranks draw the same ones (the same dropout masks)" in text
    assert text.endswith(
        "not examined: DistributedDataParallel(Linear). With --continue, each is examined at its own forward"
    )


def test_replicas_that_have_drifted_by_a_later_step(doctor: Doctor) -> None:
    done = doctor(program(rank_counts="1"), "--step", "2")
    assert done.returncode == 1, done.stderr
    text = words(done.stdout)
    assert "forward 2 of DistributedDataParallel(Sequential): 2 ranks, 1 disagreement" in text
    assert "between ranks (rank 0 | rank 1): 0.weight differs before the run" in text
    assert "step 0" in text
    assert "step 1" not in text


@pytest.mark.real
def test_a_script_goes_on_as_if_nothing_had_been(doctor: Doctor) -> None:
    code = program(**(OURS | {"end": "sys.exit(9)"}))
    done = doctor(code, "--continue", "--step", "2", warm_ranks=False)
    plain = doctor(code, command="run")
    assert (done.returncode, plain.returncode) == (9, 9), done.stderr
    losses = sorted(line for line in done.stdout.splitlines() if "] step " in line)
    assert len(losses) == 6
    assert losses == sorted(plain.stdout.splitlines())
    assert "forward 2 of" in done.stdout


def test_a_script_without_a_wrapped_module(doctor: Doctor) -> None:
    for code, exit_code in (("raise SystemExit(7)", 7), ("", 2)):
        done = doctor(code, "-n", "1")
        assert done.returncode == exit_code
        assert ("sl.debug.compare_replicas" in words(done.stderr)) == (exit_code == 2)


MISTAKES = {
    "-n 0 program.py": "argument -n: expected a number of ranks from 1 to 1,024, got '0'",
    "--step 0 program.py": "argument --step: expected the number of a step from 1 to 1,000,000,000, got '0'",
    "-m no_such_module": "there is no module 'no_such_module'",
    "-m": "expected SCRIPT or -m MODULE",
    "-n two": "expected a number of ranks from 1 to 1,024, got 'two'",
}


def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").touch()
    monkeypatch.chdir(tmp_path)
    for line, text in MISTAKES.items():
        assert main(["doctor", *line.split()]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert text in message, line


@pytest.mark.real
def test_this_host_is_looked_at(tmp_path: Path, forks: Forks) -> None:
    done = forks.launch(tmp_path, command="doctor").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two ranks          connected, and computed a sum over shared memory" in done.stdout
    assert [line[3:].split()[0] for line in done.stdout.splitlines()][:2] == ["versions", "processor"]


def test_a_host_with_a_problem_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("syncline.tools.doctor.host.dist.is_gloo_available", lambda: False)
    assert [finding.name for finding in findings() if finding.kind == "problem"] == ["torch.distributed"]
    assert main(["doctor"]) == 1
    assert "!! torch.distributed  this torch was built without Gloo" in capsys.readouterr().out


def test_gpus_are_listed_and_a_torch_without_nccl_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 90000)  # a build for CUDA asks the driver

    def found() -> tuple[str, str]:
        (finding,) = [finding for finding in findings() if finding.name == "CUDA"]
        return finding.kind, finding.text

    monkeypatch.setattr("syncline.tools.doctor.host.dist.is_nccl_available", lambda: True)
    assert found()[0] == "fine"
    assert found()[1].startswith("2 x a GPU, CUDA ")
    monkeypatch.setattr("syncline.tools.doctor.host.dist.is_nccl_available", lambda: False)
    assert found()[0] == "problem"
    assert "this torch was built without NCCL" in found()[1]


def test_a_name_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getnameinfo", lambda address, flags: ("localhost", "0"))
    for seconds, kind in ((0.002, "fine"), (5.0, "note")):
        times = iter([100.0, 100.0 + seconds])
        monkeypatch.setattr("syncline.tools.doctor.host.time.perf_counter", lambda times=times: next(times))
        (found,) = [one for one in findings() if one.name == "name lookup"]
        assert (found.kind, "/etc/hosts" in found.text) == (kind, kind == "note")
