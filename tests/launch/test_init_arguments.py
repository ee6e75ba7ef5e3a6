"""`sl.init` is given different arguments on different ranks, under real launchers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_run import clean_environment

import hangs
from forks import Forks

PROGRAM = """
import os
import syncline as sl

rank = int(os.environ["RANK"])
transports = ("shm", "c10d", "auto")
said = []
for pair in [(first, second) for first in transports for second in transports]:
    try:
        sl.init(pair[rank], timeout=30)
        sl.mean(1.0)
        sl.shutdown()
    except sl.ContractMismatch as error:
        said.append(f"{pair}: {error}")
    else:
        said.append(f"{pair}: joined")
with open(f"said{rank}", "w") as file:
    file.write("\\n".join(said))
"""


@pytest.mark.parametrize("launcher", ["torchrun", "syncline run"])
@pytest.mark.real
def test_transports_that_differ_are_one_error_on_all_ranks(
    launcher: str, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"]
        done = hangs.run(
            command,
            cwd=tmp_path,
            env=clean_environment(),
        )
    else:
        done = forks.launch(tmp_path, "-n", "2", "program.py").wait()
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert said[0].count(": joined") == 3
    assert said[0].count("sl.init: the ranks do not agree") == 6
