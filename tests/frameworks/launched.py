"""Programs that a launcher, or a framework itself, starts on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hangs

ROOT = Path(__file__).parents[2]

LAUNCHERS = {
    "syncline run": ("syncline", "run", "-n", "2"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    # On CPUs, `accelerate launch --cpu` starts one process, whatever --num_processes is.
    "accelerate launch": ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
}


def launch(launcher: str, program: Path, *arguments: str) -> str:
    """Run a program on two ranks of the CPU, and return what it printed."""
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    finished = hangs.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(program), *arguments],
        env=os.environ | variables,
        stderr=subprocess.STDOUT,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of these tests, as on a machine without a scheduler."""
    schedulers = ("SLURM", "PMI", "OMPI")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(schedulers)}
    return hangs.run(
        [sys.executable, *map(str, arguments)],
        env=variables | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
    )


def found_by(program: str, folder: Path) -> dict[str, Any]:
    """Run a program of this folder that starts its own ranks, and return what it found."""
    finished = python(program, folder)
    assert finished.returncode == 0, finished.stderr
    results: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return results
