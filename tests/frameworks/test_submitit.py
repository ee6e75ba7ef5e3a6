"""examples/slurm/with_submitit.py on submitit's local executor: ranks, the stop signal, back to the queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hangs

pytest.importorskip("submitit")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "slurm" / "with_submitit.py"


def tasks_of(controller: int) -> list[int]:
    path = Path(f"/proc/{controller}/task/{controller}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The example with more steps than it can take, and the pid of the controller of its two ranks."""
    steps = "1000000000"
    command = [sys.executable, str(PROGRAM), "--cluster=local", "--ranks=2", f"--directory={tmp_path}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, f"--steps={steps}"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    controller = re.match(r"job (\d+)", line)
    assert controller, line
    try:
        yield process, int(controller[1])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def log_of(folder: Path, controller: int, rank: int, kind: str) -> str:
    path = folder / "submitit" / f"{controller}_{rank}_log.{kind}"
    return path.read_text() if path.exists() else ""


def wait_until(folder: Path, controller: int, pattern: str, *, kind: str = "out", count: int = 1) -> str:
    deadline = time.monotonic() + hangs.HANG_SECONDS
    while len(re.findall(pattern, log_of(folder, controller, 0, kind))) < count:
        if time.monotonic() > deadline:
            hangs.end_trees([controller])
            logs = [log_of(folder, controller, rank, kind) for rank in (0, 1) for kind in ("out", "err")]
            raise TimeoutError("\n".join(logs))
        time.sleep(0.05)
    return log_of(folder, controller, 0, kind)


def test_a_job_of_submitit_saves_is_put_back_into_the_queue_and_resumes(
    job: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    _, controller = job
    wait_until(tmp_path, controller, r"step 100\n")
    for pid in tasks_of(controller):  # what submitit does at the time limit
        os.kill(pid, signal.SIGUSR2)
    saved = wait_until(tmp_path, controller, r"stopped after step \d+, saved", kind="err")
    first = int(re.search(r"stopped after step (\d+)", saved)[1])  # type: ignore[index]
    assert "got SIGUSR2" in saved
    out = wait_until(tmp_path, controller, r"Starting with JobEnvironment", count=2)
    assert "Requeued job" in out
    later = (first // 100 + 1) * 100
    wait_until(tmp_path, controller, rf"step {later}\n")
    steps = [int(step) for step in re.findall(r"step (\d+)\n", log_of(tmp_path, controller, 0, "out"))]
    assert steps == sorted(set(steps)), "it resumed, and did not begin again"
    of_rank_1 = log_of(tmp_path, controller, 1, "out")
    assert "Starting with JobEnvironment" in of_rank_1
    assert not re.search(r"^step \d+$", of_rank_1, re.M), "rank 1 trains with rank 0, and not alone"


def test_the_result_of_a_job_of_submitit_comes_back(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--cluster=local", "--ranks=2", f"--directory={tmp_path}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = hangs.run([*command, "--steps=300"], env=variables)
    assert done.returncode == 0, done.stderr
    loss = re.search(r"^loss (\d+\.\d+)$", done.stdout, re.M)
    assert loss, done.stdout
    assert float(loss[1]) < 0.5
    names = sorted(path.name for path in (tmp_path / "submitit").glob("*_log.out"))
    assert len(names) == 2
    assert "step 300" in (tmp_path / "submitit" / names[0]).read_text()
    assert "step" not in (tmp_path / "submitit" / names[1]).read_text(), "rank 1 is not another rank 0"
