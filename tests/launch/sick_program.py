"""A training run with an illness, or with its cure: `sick_program.py ILLNESS DIRECTORY`. Its steps are traced."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import syncline as sl

NUM_STEPS = 14
NUM_BRIEF_STEPS = 100
"""Together they are long enough to judge, on any machine."""

WRAPPED: dict[str, dict[str, Any]] = {
    "tiny buckets": {"bucket_cap_mb": 0.001},
    "one huge bucket": {"bucket_cap_mb": 1000},
    "unused parameter": {"find_unused_parameters": True},
}
"""How the module is wrapped; as usual if an illness is not named."""

LINK = ("one huge bucket", "slow link")


class Net(nn.Module):
    """Twelve layers, and a head that is used or not."""

    def __init__(self, width: int, *, has_head: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))
        if has_head:
            self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def main(illness: str, directory: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = sl.init(timeout=60).rank
    width, rows = (208 if illness in LINK else 64), (6000 if illness == "one huge bucket" else 64)
    net = Net(width, has_head=illness == "unused parameter")
    ddp = sl.DistributedDataParallel(net, **WRAPPED.get(illness, {}))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1e-3))
    x = torch.randn(rows, width) + rank
    with sl.trace(directory):
        for step in range(NUM_BRIEF_STEPS if illness.startswith("tiny buckets") else NUM_STEPS):
            if illness == "slow loader" and rank == 1:
                time.sleep(0.4)  # far more than a busy machine adds to a step
            if illness == "lost rank" and rank == 1 and step == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()


def main_with_steps(directory: str) -> None:
    """The cure of a lost rank."""
    torch.set_num_threads(1)
    rank = sl.init(timeout=60).rank
    ddp = sl.DistributedDataParallel(Net(64, has_head=False))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1e-3))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    x = torch.randn(64, 64) + rank
    with sl.trace(directory):
        for step in sl.steps(state, until=NUM_STEPS):
            with step:
                if rank == 1 and step.number == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()


if __name__ == "__main__":
    if sys.argv[1] == "lost rank, cured":
        main_with_steps(sys.argv[2])
    else:
        main(*sys.argv[1:])
