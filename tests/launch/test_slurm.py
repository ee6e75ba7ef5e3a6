"""The scripts of examples/slurm on a real SLURM: a controller and two nodes, which are all this machine.

Needs root, and slurmctld, slurmd and the client commands (Debian: slurmctld slurmd slurm-client); skipped otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hangs
from support.states import wait_until
from syncline.testing import held_port

ROOT = Path(__file__).parents[2]
TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""

IDENTITY = """
import os, syncline as sl
from syncline import launchers
found = launchers.current()  # sl.init sets the variables of torchrun
world = sl.init(timeout=60)
total = sl.mean(float(world.rank))
nodes = os.environ["SLURM_STEP_NODELIST"]
print(world.rank, world.size, world.local_rank, world.local_size, found.launcher, nodes, total)
sl.shutdown()
"""

# In its first life it trains until it is asked to stop, in its second life for three more steps.
TRAINING = """
import os, pathlib, sys, torch, syncline as sl
world = sl.init(timeout=60)
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
state = sl.TrainState(model=ddp, optimizer=optimizer)
checkpointer = sl.Checkpointer(sys.argv[1])
checkpointer.load(state)
first = state.step
checkpointer.stop_if_asked(state)
while first == 0 or state.step < first + 3:
    ddp(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
    state.commit()
    checkpointer.stop_if_asked(state)
    if world.rank == 0 and state.step == 5:
        pathlib.Path(sys.argv[1], "training").touch()
if world.rank == 0:
    pathlib.Path(sys.argv[1], "done").write_text(f"{first} {state.step}")
sl.shutdown()
"""

# The last rank, which is on the second node, is killed once. All end when it has joined the others again.
LOST = """
import os, pathlib, signal, sys, torch, syncline as sl
folder = pathlib.Path(sys.argv[1])
joins = (folder / "killed").exists()
first = sl.init(timeout=60).rank
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
state = sl.TrainState(model=ddp, optimizer=optimizer)
sizes = []
for step in sl.steps(state, until=1_000_000, patience=60):
    with step:
        optimizer.zero_grad()
        if not joins and (first, step.number) == (3, 5):
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
    size = sl.world().size
    if not sizes or size != sizes[-1]:
        sizes.append(size)
        begin = step.number
    if (joins or len(sizes) == 3) and step.number == begin + 3:
        break
here = sl.world()
weights = [parameter.tolist() for parameter in ddp.parameters()]
(folder / f"{here.rank} of {here.size}").write_text(f"step {state.step}: {weights}")
sl.shutdown()
"""

# It trains until a node is lost, and then on, if enough ranks are left. In its second life it trains for three steps.
RESILIENT = """
import os, pathlib, sys, time, torch, syncline as sl
folder, min_ranks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
world = sl.init(timeout=60)
node, is_second_life = os.environ["SLURMD_NODENAME"], os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
state = sl.TrainState(model=ddp, optimizer=optimizer)
checkpointer = sl.Checkpointer(folder / "saves")
checkpointer.load(state)
first, last = state.step, None
try:
    for step in sl.steps(state, until=1_000_000, min_ranks=min_ranks, patience=1.0):
        with step:
            optimizer.zero_grad()
            ddp(torch.full((1, 2), float(world.rank))).square().mean().backward()
            optimizer.step()
        if step.is_committed and state.step == 5 and not is_second_life:
            checkpointer.save(state)
            (folder / f"{node} trains").write_text(f"{os.getppid()}")
        if last is None and (sl.world().size < world.size or is_second_life):
            last = state.step + 3
        if state.step == last:
            break
except sl.PeerLost as error:
    print(error, file=sys.stderr)
    sys.exit(sl.EXIT_STOPPED)
if sl.world().rank == 0:
    (folder / "done").write_text(f"{first} {sl.world().size}")
sl.shutdown()
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster whose daemons have started."""

    folder: Path
    variables: dict[str, str]

    def run(self, *command: str, **variables: str) -> str:
        done = hangs.run(command, env=self.variables | variables, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state_of(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job)

    def wait_for_state(self, state: str, job: str) -> None:
        self._wait(lambda: state in self.state_of(job), job)

    def wait_for(self, path: Path, job: str) -> None:
        self._wait(path.exists, job)

    def _wait(self, is_so: Callable[[], bool], job: str) -> None:
        def tell() -> str:
            state = self.state_of(job)
            hangs.end_trees([], mark=self.variables["SLURM_CONF"])
            return state + (self.folder / f"slurm-{job}.out").read_text()

        wait_until(is_so, tell)

    def submit(self, *arguments: str, **variables: str) -> str:
        output = f"--output={self.folder}/slurm-%j.out"
        return self.run("sbatch", "--parsable", output, *arguments, **variables).strip()


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def port() -> Iterator[str]:
    """A port at which the ranks of a job meet. It stays free while the job waits in the queue."""
    with held_port() as port:
        yield str(port)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    path = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    path.write_text(CONFIGURATION.format(host=host, folder=folder, ports=free_ports(3)))
    # Where it may be missing beside this Python. And all nodes are this machine, so each would take itself for the host
    # of the store: two that begin to listen at the same moment both fail.
    torchrun = folder / "torchrun"
    torchrun.write_text(
        '#!/bin/sh\nis_host=0; [ "$SLURM_NODEID" = 0 ] && is_host=1\n'
        f'exec {sys.executable} -m torch.distributed.run --rdzv-conf "is_host=$is_host" "$@"\n'
    )
    torchrun.chmod(0o755)
    own = f"{folder}:{Path(sys.executable).parent}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    variables |= {"SLURM_CONF": str(path), "PATH": f"{own}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    cluster = Slurm(folder, variables)
    commands = [["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]]
    daemons = []
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(folder / f"{'-'.join(command)}.log", "w"))
            daemons.append(
                subprocess.Popen(
                    [*command, "-D", "-f", str(path)],
                    env=variables,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        try:
            cluster.run("srun", "--nodes=2", "true")  # waits until both nodes are up
            yield cluster
        finally:
            subprocess.run(["scancel", "--user=root"], env=variables, check=False, capture_output=True)
            for daemon in daemons:  # which would take 20 s each to end by SIGTERM
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--nodes=1", "--ntasks=2"],
            ["0 2 0 2 slurm n1 0.5", "1 2 1 2 slurm n1 0.5"],
        ),
        (
            ["--nodes=2", "--ntasks=3", "--distribution=block", "--ntasks-per-node=2"],
            ["0 3 0 2 slurm n[1-2] 1.0", "1 3 1 2 slurm n[1-2] 1.0", "2 3 0 1 slurm n[1-2] 1.0"],
        ),
        (
            ["--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic"],
            [f"{rank} 4 {rank // 2} 2 slurm n[1-2] 1.5" for rank in range(4)],
        ),
    ],
)
def test_each_task_of_srun_is_a_rank(slurm: Slurm, options: list[str], expected: list[str]) -> None:
    # The nodes' names are not in DNS here. On one node no name is needed.
    given = {} if "--nodes=1" in options else {"MASTER_ADDR": "127.0.0.1"}
    out = slurm.run("srun", *options, sys.executable, "-c", IDENTITY, **given)
    assert sorted(out.splitlines()) == expected


def test_a_batch_script_without_srun_does_not_hang_and_is_warned(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "alone.sh"
    script.write_text(
        '#!/bin/bash\npython -c "import syncline as sl; print(sl.init(timeout=20).size)"\ntouch "$1"\n'
    )
    job = slurm.submit("--ntasks=4", str(script), str(tmp_path / "ended"))
    slurm.wait_for(tmp_path / "ended", job)
    out = (slurm.folder / f"slurm-{job}.out").read_text()
    assert "SLURM_NTASKS=4, but srun did not start this process" in out
    assert out.splitlines()[-1] == "1"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("ranks.sbatch", ["--nodes=2", "--ntasks-per-node=1"]),
        ("torchrun.sbatch", ["--nodes=2"]),
        ("resilient.sbatch", ["--nodes=2"]),
    ],
)
def test_a_job_that_is_asked_to_stop_saves_goes_back_to_the_queue_and_resumes(
    slurm: Slurm, port: str, program: Path, tmp_path: Path, script: str, options: list[str]
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    variables = {"MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "1", "MASTER_PORT": port}
    job = slurm.submit(*options, f"examples/slurm/{script}", str(program), str(runs), **variables)
    slurm.wait_for(runs / "training", job)
    # The signal that SLURM sends before the time limit, sent now: to the script (B:), or to the tasks.
    to = ["--batch"] if script == "torchrun.sbatch" else []
    slurm.run("scancel", "--signal=USR1", *to, job)
    slurm.wait_for_state("Restarts=1", job)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")  # SLURM would wait for two minutes
    slurm.wait_for(runs / "done", job)
    first, last = map(int, (runs / "done").read_text().split())
    assert first >= 5
    assert last == first + 3
    out = (slurm.folder / f"slurm-{job}.out").read_text()
    assert f"got SIGUSR1: stopped after step {first}, saved in" in out, out


def test_a_rank_that_is_killed_on_one_node_joins_the_others_again(
    slurm: Slurm, port: str, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOST)
    variables = {"MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "2", "MASTER_PORT": port}
    job = slurm.submit(
        "--nodes=2", "examples/slurm/resilient.sbatch", str(program), str(tmp_path), **variables
    )
    for rank in range(4):
        slurm.wait_for(tmp_path / f"{rank} of 4", job)
    assert len({(tmp_path / f"{rank} of 4").read_text() for rank in range(4)}) == 1
    slurm.wait_for_state("JobState=COMPLETED", job)
    out = (slurm.folder / f"slurm-{job}.out").read_text()
    assert "the other ranks train on, and it is started again, to join them" in out
    assert "rank 3 of 4 was lost; the ranks, now 3, repeat the step" in out
    assert "1 process joined; the ranks, now 4, continue" in out


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("min_ranks", [1, 2])
def test_a_lost_node_costs_a_step_and_with_too_few_ranks_the_job_goes_back_to_the_queue(
    slurm: Slurm, port: str, tmp_path: Path, min_ranks: int
) -> None:
    program = tmp_path / "train.py"
    program.write_text(RESILIENT)
    variables = {"MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "1", "MASTER_PORT": port}
    variables["SYNCLINE_TOKEN"] = "a token of this test only"
    script = "examples/slurm/resilient.sbatch"
    job = slurm.submit("--nodes=2", script, str(program), str(tmp_path), str(min_ranks), **variables)
    for node in ("n1", "n2"):
        slurm.wait_for(tmp_path / f"{node} trains", job)
    launcher = int((tmp_path / "n2 trains").read_text())
    os.kill(parent_of(launcher), signal.SIGKILL)  # the task of the node
    os.kill(launcher, signal.SIGKILL)
    if min_ranks == 2:
        slurm.wait_for_state("Restarts=1", job)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")  # SLURM would wait for two minutes
    slurm.wait_for(tmp_path / "done", job)
    first, size = map(int, (tmp_path / "done").read_text().split())
    out = (slurm.folder / f"slurm-{job}.out").read_text()
    assert (first, size) == ((5, 2) if min_ranks == 2 else (0, 1)), out
    slurm.wait_for_state("JobState=COMPLETED", job)
    assert ("expected at least 2 ranks (min_ranks)" in out) is (min_ranks == 2), out
