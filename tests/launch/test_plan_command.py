"""`syncline plan` where it runs processes: a model that is measured, a machine that is calibrated, and `--tune`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hangs
from syncline.tools.plan.machine import load_machine

pytestmark = pytest.mark.real

MODEL = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    return model, torch.randn(16, 32)

def with_loss():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
        def forward(self, x, y):
            return {"loss": (self.layer(x) - y).square().mean(), "logits": x}
    return Net(), [torch.randn(2, 4), torch.randn(2, 4)]

def only_a_module():
    return torch.nn.Linear(2, 2)

def broken():
    raise RuntimeError("there is no data")

def wrong_shape():
    return torch.nn.Linear(2, 2), torch.randn(3, 3)
"""

PROGRAM = """
import sys
import torch, syncline as sl

sl.init()
if "--fail" in sys.argv:
    raise RuntimeError("no such option")
ddp = sl.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
size = int(sys.argv[sys.argv.index("--size") + 1]) if "--size" in sys.argv else 4
try:
    for step in range(10_000):
        ddp(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    print("the end of the program")
"""


def syncline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncline", *arguments]
    return hangs.run(command, timeout_seconds=600)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize(("function", "numel"), [("build", 2632), ("with_loss", 20)])
def test_a_model_is_measured_in_as_many_processes_as_a_host_has_ranks(
    model: str, function: str, numel: int
) -> None:
    done = syncline("plan", f"{model}:{function}", "-n", "2", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_parameters"] == numel
    assert found["num_ranks"] == 2
    assert 0 < found["compute"] < 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("only_a_module", "return model, (tokens, targets)"),
        ("absent", "has no function absent"),
        ("broken", "RuntimeError: there is no data"),
        ("wrong_shape", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_function_that_makes_no_model_is_explained_once(model: str, function: str, words: str) -> None:
    done = syncline("plan", f"{model}:{function}", "-n", "2")
    assert done.returncode == 1
    assert done.stderr.count(words) == 1


def test_a_file_that_fails_is_shown_once_from_its_own_first_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import a_module_that_is_missing\n")
    done = syncline("plan", f"{path}:build", "-n", "2")
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert re.match(r"syncline run: ranks 0, 1 \(on .*\) failed with exit code 1, by the same error", first)
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 1, in <module>',
        "    import a_module_that_is_missing",
        "ModuleNotFoundError: No module named 'a_module_that_is_missing'",
    ]


def test_a_machine_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = syncline("bench", "--calibrate", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    machine = load_machine(path)
    assert machine.is_measured
    assert sorted(machine.gloo) == [2, 4, 8]
    assert all(cost.time(1 << 20) > 0 for cost in machine.shared_memory.values())
    assert all(min(coding) > 0 for coding in machine.codings.values())
    done = syncline("plan", "--parameters", "1M", "--compute", "10ms", "--machine", str(path))
    assert "measured" in done.stdout


def test_a_program_is_tried_with_the_best_settings(program: str) -> None:
    options = ["--rounds", "1", "--steps", "6", "--vary", "size=4,8"]
    done = syncline("plan", "-n", "2", *options, "--tune", program)
    assert done.returncode == 0, done.stderr
    out, err = done.stdout, done.stderr
    assert re.search(r"^as it is +\d", out, re.MULTILINE)
    for words in ("bucket_cap_mb=", 'transport="c10d"', "--size 8"):
        assert words in out
    assert "failed" not in out
    assert "Won: " in out or "Nothing was clearly faster" in out
    assert "the end of the program" not in out + err  # what the runs print is shown only if they fail


def test_a_program_that_fails_shows_what_it_printed(program: str) -> None:
    done = syncline("plan", "--tune", program, "--fail")
    assert done.returncode == 1
    assert "no such option" in done.stderr


def test_a_program_without_a_step_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("print('hello')\n")
    done = syncline("plan", "--tune", str(path))
    assert done.returncode == 1
    assert "has not run a step of a wrapped module" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tune"], "expected a script"),
        (["--tune", "absent.py"], "absent.py"),
        (["--steps", "1", "--tune", __file__], "expected a number of steps from 5"),
        (["--vary", "size", "--tune", __file__], "at least two positive numbers"),
        (["--vary", "size=1,two", "--tune", __file__], "at least two positive numbers"),
        (["--vary", "=1,2", "--tune", __file__], "an option"),
    ],
)
def test_wrong_usage_of_tune_is_explained(options: list[str], words: str) -> None:
    done = syncline("plan", *options)
    assert done.returncode == 2
    assert words in done.stderr
