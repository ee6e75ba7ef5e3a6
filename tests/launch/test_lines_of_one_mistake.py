"""One mistake is at most 15 lines under `syncline run`, however many ranks make it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import syncline as sl
from forks import Forks
from syncline import tracebacks
from syncline.session import record_failure
from syncline.testing import run_ranks
from syncline.tools.launch.failures import Failure, describe, is_in, read_error_file
from syncline.transport import Transport

MISTAKES = {
    "sl.DistributedDataParallel(model, process_group=group, strategy='diloco')": r"sl\.DiLoCo\(\)",
    "sl.DistributedDataParallel(model, process_group=group, find_unused_parameters='True')": (
        r"find_unused_parameters to be True or False, got 'True' \(all ranks\)"
    ),
    "sl.DistributedDataParallel(model, process_group=group, find_unused_paramters=True)": (
        "did you mean 'find_unused_parameters'"
    ),
    "sl.DistributedDataParallel(model, process_group=group).bias": r"ddp\.module\.bias",
    "sl.DistributedDataParallel(model, process_group=group)(torch.ones(3, 5))": "shapes cannot be multiplied",
    "sl.DistributedDataParallel(torch.nn.Linear(4, 2 + group.rank), process_group=group)": "Build the same module",
    "(sl.average_ if group.rank == 0 else sl.broadcast_)(x, group=group)": "the ranks made different calls",
    "def main(:\n    pass": "SyntaxError",
    "import no_such_package": "No module named",
    "import math\nmath.sqrtt(2)": "Did you mean: 'sqrt'",
}
"""Programs that each rank runs, and what exactly one line says."""


def shown_by_launcher(
    source: str, num_ranks: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines that ranks print which fail by a program, and those of the launcher's report."""
    errors: dict[int, Exception] = {}

    def be_a_rank(group: Transport) -> None:
        try:
            exec(
                compile(source, "train.py", "exec"),
                {
                    "sl": sl,
                    "torch": torch,
                    "group": group,
                    "model": torch.nn.Linear(4, 2),
                    "x": torch.ones(3),
                },
            )
        except Exception as error:
            errors[group.rank] = error

    run_ranks(num_ranks, be_a_rank)
    failures = []
    for rank, error in sorted(errors.items()):
        (folder / str(rank)).mkdir(parents=True)
        path = str(folder / str(rank) / "error.json")
        described = tracebacks.describe(error)
        record_failure(error, path, brief=described.brief, whole=described.whole)
        tracebacks.print_once(described, error_file=path, is_whole=False)
        failures.append(Failure(rank=rank, pid=rank, return_code=1, record=read_error_file(path)))
    printed = capsys.readouterr().err.splitlines()
    seen = [replace(failure, is_shown=is_in(failure, printed)) for failure in failures]
    assert len(seen) == num_ranks
    return printed + describe(seen, host="host").splitlines()


def test_one_mistake_of_all_ranks_is_at_most_15_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (source, says) in enumerate(MISTAKES.items()):
        for num_ranks in (2, 4):
            folder = tmp_path / f"{number} {num_ranks}"
            lines = shown_by_launcher(source, num_ranks, folder, capsys)
            text = "\n".join([source, *lines])
            assert len(lines) <= 15, text
            assert sum(bool(re.search(says, line)) for line in lines) == 1, text


LAUNCHED = {
    "sl.DistributedDataParallel(torch.nn.Linear(4, 2 + world.rank))\n": "Build the same module",
    "ddp = sl.DistributedDataParallel(torch.nn.Linear(4, 2))\nif world.rank == 1:\n    raise KeyError('label')\n"
    "ddp(torch.ones(1, 4)).sum().backward()\n": "KeyError: 'label'",
}


def test_so_it_is_under_the_launcher_also_if_one_rank_makes_it(forks: Forks, tmp_path: Path) -> None:
    for source, says in LAUNCHED.items():
        (tmp_path / "train.py").write_text(
            f"import torch, syncline as sl\nworld = sl.init(timeout=60)\n{source}"
        )
        done = forks.launch(tmp_path, "-n", "4", "train.py", warm_ranks=True).wait()
        lines = (done.stdout + done.stderr).splitlines()
        assert done.returncode == 1
        assert len(lines) <= 15, "\n".join(lines)
        assert sum(bool(re.search(says, line)) for line in lines) == 1, "\n".join(lines)
