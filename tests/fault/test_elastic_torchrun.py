"""`sl.steps` under torchrun on two hosts: torchrun ends all ranks of a host together, and those of the other train on.

The hosts are network namespaces of this machine. Needs root; skipped otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from elastic import Fault
from elastic_hosts import Job, Training

from syncline.testing import SimulatedHosts

pytestmark = pytest.mark.real

# In the end, torchrun waits five minutes for the lost host.
TORCHRUN = """
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.run import main
barrier = SimpleElasticAgent._exit_barrier
def short(agent):
    agent._exit_barrier_timeout = 1
    barrier(agent)
SimpleElasticAgent._exit_barrier = short
main()
"""


class StartsTorchrun(Job):
    """With torchrun in the place of `syncline run`."""

    rendezvous = "c10d"
    num_restarts = 0

    def start(self, letter: str, num_ranks: int, *command: object) -> None:
        torchrun, first = self.folder.with_suffix(".py"), SimulatedHosts.address_of("a")
        torchrun.write_text(TORCHRUN)
        number = "ab".index(letter)
        where: list[object] = ["--node-rank", number, "--master-addr", first, "--master-port", "29611"]
        if self.rendezvous == "c10d":
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29611", "--rdzv-id", "one"]
            where += [
                "--local-addr",
                SimulatedHosts.address_of(letter),
                "--rdzv-conf",
                f"is_host={1 - number}",
            ]
        options = ("--nnodes", 2, "--nproc-per-node", num_ranks, "--max-restarts", self.num_restarts)
        self.launchers[letter] = self.forks.start(
            self.folder,
            torchrun,
            *(*options, *where, *command),
            variables=self.variables(letter),
            host=self.hosts.names[letter],
            warm_ranks=True,
        )


@dataclass
class TrainingByTorchrun(StartsTorchrun, Training):
    """Ranks of `elastic`."""


@pytest.fixture
def training(job_of: Callable[[type[TrainingByTorchrun]], TrainingByTorchrun]) -> TrainingByTorchrun:
    return job_of(TrainingByTorchrun)


@pytest.fixture
def job(job_of: Callable[[type[StartsTorchrun]], StartsTorchrun]) -> StartsTorchrun:
    return job_of(StartsTorchrun)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
@pytest.mark.parametrize("lost", ["a rank", "the agent"])
def test_the_ranks_of_the_other_host_train_on(
    training: TrainingByTorchrun, lost: str, rendezvous: str
) -> None:
    training.rendezvous = rendezvous
    if lost == "a rank":
        # torchrun ends rank 3 a moment later. Until then it must not finish.
        training.begin(
            Fault(rank=4, step=3, place="last bucket"),
            Fault(rank=3, step=3, place="forward", attempt=2, kind="wait"),
            patience_seconds=1.0,
        )
    else:
        training.begin_and_halt(patience_seconds=1.0)
        training.kill("b")
        training.go_on()
    code, _, err = training.wait("a")
    assert code == 0, err
    assert training.finished() == [0, 1, 2]
    assert training.wait("b")[0] != 0


RESUMES = """
import os, pathlib, signal, sys
import torch, syncline as sl

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once, because all ranks write to one file

folder = pathlib.Path(sys.argv[1])
first, size = sl.init(timeout=60).rank, sl.world().size
ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
state = sl.TrainState(model=ddp, optimizer=optimizer)
checkpointer = sl.Checkpointer(folder / "saves")
checkpointer.load(state)
is_second_life = state.step > 0
say("begins", first, size, state.step, os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in sl.steps(state, until=30 if is_second_life else 1_000_000, patience=1.0):
    with step:
        if first == 2 and step.number == 12 and not is_second_life:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(torch.full((2, 2), float(first))).square().mean().backward()
        optimizer.step()
    if step.is_committed and state.step == 10:
        checkpointer.save(state)
say("ends", sl.world().rank, sl.world().size, state.step)
sl.shutdown()
"""


def test_with_restarts_all_ranks_are_started_again_and_resume(job: StartsTorchrun, tmp_path: Path) -> None:
    """The agent of the lost rank counts the restart, and the other agent does not."""
    program = tmp_path / "program.py"
    program.write_text(RESUMES)
    job.num_restarts = 1
    for letter, num_ranks in (("a", 2), ("b", 1)):
        job.start(letter, num_ranks, program, tmp_path)
    (code_a, out_a, err_a), (code_b, out_b, err_b) = job.wait("a"), job.wait("b")
    assert (code_a, code_b) == (0, 0), err_a + err_b
    lines = sorted((out_a + out_b).splitlines())
    assert lines == [
        "begins 0 3 0 0",
        "begins 0 3 10 0",
        "begins 1 3 0 0",
        "begins 1 3 10 0",
        "begins 2 3 0 0",
        "begins 2 3 10 1",
        *(f"ends {rank} 3 30" for rank in range(3)),
    ]
