"""One mistake is at most 15 lines under `syncline run`, however many ranks make it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import hangs

WRAP = "import torch, syncline as sl\nworld = sl.init(timeout=5)\nmodel = torch.nn.Linear(4, 2)\n"

MISTAKES = {
    "a string for a strategy": (
        WRAP + "sl.DistributedDataParallel(model, strategy='diloco')\n",
        "sl.DiLoCo()",
    ),
    "a string for a boolean": (
        WRAP + "sl.DistributedDataParallel(model, find_unused_parameters='True')\n",
        r"find_unused_parameters to be True or False, got 'True' \(all ranks\)",
    ),
    "a misspelt argument": (
        WRAP + "sl.DistributedDataParallel(model, find_unused_paramters=True)\n",
        "did you mean 'find_unused_parameters'",
    ),
    "an attribute of the module": (WRAP + "sl.DistributedDataParallel(model).bias\n", r"ddp\.module\.bias"),
    "different models": (
        WRAP + "sl.DistributedDataParallel(torch.nn.Linear(4, 2 + world.rank))\n",
        "Build the same module",
    ),
    "different calls": (
        WRAP + "x = torch.ones(3)\nif world.rank == 0:\n    sl.average_(x)\nelse:\n    sl.broadcast_(x)\n",
        "the ranks made different calls",
    ),
    "an exception on one rank": (
        WRAP + "ddp = sl.DistributedDataParallel(model)\nif world.rank == 1:\n    raise KeyError('label')\n"
        "ddp(torch.ones(1, 4)).sum().backward()\n",
        "KeyError: 'label'",
    ),
    "an exception inside of torch on all ranks": (
        WRAP + "sl.DistributedDataParallel(model)(torch.ones(3, 5))\n",
        "shapes cannot be multiplied",
    ),
    "a syntax error": ("def main(:\n", "SyntaxError"),
    "a missing import": ("import no_such_package\n", "No module named"),
    "an attribute of Python's, misspelt": ("import math\nmath.sqrtt(2)\n", "Did you mean: 'sqrt'"),
}


@pytest.mark.real
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_at_most_15_lines(tmp_path: Path, mistake: str, num_ranks: int) -> None:
    source, says = MISTAKES[mistake]
    (tmp_path / "train.py").write_text(source)
    command = [sys.executable, "-m", "syncline", "run", "-n", str(num_ranks), "train.py"]
    done = hangs.run(command, cwd=tmp_path)
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 1
    assert len(lines) <= 15, "\n".join(lines)
    assert sum(bool(re.search(says, line)) for line in lines) == 1, "\n".join(lines)
