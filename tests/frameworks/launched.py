"""Programs that a launcher starts on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LAUNCHERS = {
    "syncline run": ("syncline.tools.cli", "run", "-n", "2"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    # On CPUs, `accelerate launch --cpu` starts one process, whatever --num_processes is.
    "accelerate launch": ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
}


def launch(launcher: str, program: Path, *arguments: str) -> str:
    """Run a program on two ranks of the CPU, and return what it printed."""
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(program), *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout
