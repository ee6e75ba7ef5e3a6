"""Train with submitit: on SLURM, or on this host for a trial. A job that is asked to stop is submitted again.

pip install submitit
python examples/slurm/with_submitit.py --cluster local --ranks 2 --directory runs/one
python examples/slurm/with_submitit.py --cluster slurm --ranks 8 --nodes 2 --directory /shared/runs/one
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

import submitit
import torch

import syncline as sl


class Training:
    """A training run that resumes from its last save. submitit pickles it, and calls it on each rank."""

    def __init__(self, directory: str, num_steps: int) -> None:
        self.directory = directory
        self.num_steps = num_steps

    def __call__(self) -> float:
        # submitit announces the time limit and preemption with SIGUSR2. Its own handler would end rank 0 in the middle
        # of a step. So the ranks first stop together and save; then rank 0 calls this handler.
        requeue: Any = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        try:
            return self.train()
        except SystemExit as stopped:
            if stopped.code == sl.EXIT_STOPPED:
                requeue(signal.SIGUSR2, None)
            raise

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return the job to submit next. submitit calls this method before it puts a job back into the queue."""
        return submitit.helpers.DelayedSubmission(self)

    def train(self) -> float:
        """Train until `num_steps`. Return the loss of the last step."""
        world = sl.init()
        model = torch.nn.Linear(4, 1)
        ddp = sl.DistributedDataParallel(model)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        state = sl.TrainState(model=ddp, optimizer=optimizer)
        checkpointer = sl.Checkpointer(self.directory, stop_signals=("SIGUSR2", "SIGTERM"))
        checkpointer.load(state)
        checkpointer.stop_if_asked(state)  # handles the signals from here on
        loss = torch.zeros(())
        while state.step < self.num_steps:
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.step))
            loss = (ddp(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.commit()
            if state.step % 100 == 0 and world.rank == 0:
                print(f"step {state.step}", flush=True)
            checkpointer.stop_if_asked(state)
        sl.shutdown()
        return loss.item()


def main() -> None:
    """Submit the training run, and wait for its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="slurm", help="local, or slurm")
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--directory", required=True, help="where to save, and where to resume from")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder=f"{args.directory}/submitit", cluster=args.cluster)
    executor.update_parameters(tasks_per_node=args.ranks, nodes=args.nodes, timeout_min=60)
    job = executor.submit(Training(f"{args.directory}/checkpoints", args.steps))
    print(f"job {job.job_id}, logs in {job.paths.folder}", flush=True)
    print(f"loss {job.results()[0]:.4f}")


if __name__ == "__main__":
    main()
