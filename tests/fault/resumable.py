"""A training run that may be killed at any step.

Arguments: DIRECTORY REPORT STRATEGY NUM_STEPS KILLED_AT KILLED_RANK. It goes on from what is saved in DIRECTORY. Rank 0
appends to REPORT, for each step, a line of the step's number and loss, and when it is done one of the final weights.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

STRATEGIES: dict[str, Any] = {
    "every-step": {},
    "diloco-4bit": {"strategy": sl.DiLoCo(3, compression=sl.compression.Quantize(4))},
    "int8": {"compression": sl.compression.Quantize(8)},
    "sharded": {"sharded": True},
}


def main() -> None:
    directory, report, strategy, *numbers = sys.argv[1:]
    num_steps, killed_at, killed_rank = map(int, numbers)
    world = sl.init(device="cpu")
    torch.manual_seed(world.rank)
    g = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(53, 6, generator=g), torch.randn(53, 1, generator=g))
    sampler = sl.DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    ddp = sl.DistributedDataParallel(model, **STRATEGIES[strategy])
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    checkpointer = sl.Checkpointer(directory, keep=2)
    checkpointer.load(state)
    lines = []
    while state.step < num_steps:
        for x, y in loader:
            if (state.step, world.rank) == (killed_at, killed_rank):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.commit(len(x))
            lines.append(f"{state.step} {loss.item().hex()}")
            if state.step % 4 == 0:
                checkpointer.save(state, blocking=state.step % 8 == 0)
                if world.rank == 0:
                    with open(report, "a") as file:
                        file.write("\n".join([*lines, ""]))
                    lines.clear()
            if state.step == num_steps:
                break
    checkpointer.wait()
    ddp.meet()
    if world.rank == 0:
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        with open(report, "a") as file:
            file.write("\n".join([*lines, f"weights {weights.numpy().tobytes().hex()}", ""]))
    sl.shutdown()


if __name__ == "__main__":
    main()
