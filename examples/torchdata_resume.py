"""Stop in the middle of an epoch, and resume with the next batch: torchdata's StatefulDataLoader with sl.TrainState.

syncline run -n 2 examples/torchdata_resume.py --directory /tmp/run --steps 5
syncline run -n 2 examples/torchdata_resume.py --directory /tmp/run --steps 20    # resumes at step 5
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import syncline as sl


def train(directory: Path, *, num_steps: int) -> list[float]:
    """Train until step `num_steps` and save. Return the losses of the steps that this call ran."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
    ddp = sl.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    sampler = sl.DistributedSampler(dataset, seed=0)
    loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=loader)
    checkpointer = sl.Checkpointer(directory)
    checkpointer.load(state)  # without a save in the directory, training starts at step 0

    losses = []
    while state.step < num_steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            state.commit()
            if state.step == num_steps:
                break
    checkpointer.save(state)
    checkpointer.close()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Resume in the middle of an epoch.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    world = sl.init()
    losses = train(args.directory, num_steps=args.steps)
    if world.rank == 0:
        print(
            f"ran {len(losses)} steps, until step {args.steps}; loss {losses[-1] if losses else float('nan'):.4f}"
        )
    sl.shutdown()


if __name__ == "__main__":
    main()
