"""Log losses and the costs of synchronizing to TensorBoard, and to Weights & Biases without a network.

syncline run -n 2 examples/log_metrics.py
tensorboard --logdir runs/log_metrics
wandb sync runs/log_metrics/wandb/offline-run-*     # later, from a machine with a network
"""

from __future__ import annotations

import argparse

import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import syncline as sl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", default="runs/log_metrics")
    args = parser.parse_args()
    world = sl.init()
    writer, run = None, None
    if world.rank == 0:  # the other ranks write nothing: the metrics are means over all ranks
        writer = SummaryWriter(args.directory)
        run = wandb.init(project="syncline", dir=args.directory, mode="offline")

    torch.manual_seed(world.rank)
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(1, args.steps + 1):
        x = torch.randn(64, 8)
        loss = (ddp(x)[:, 0] - x.norm(dim=1)).square().mean()
        ddp.report(loss=loss)  # is sent with the gradients, without a collective of its own
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if writer and run and ddp.last_step:
            statistics = ddp.statistics()
            scalars = ddp.last_step.scalars() | {"total/bytes": statistics.total_bytes}
            run.log(scalars, step=step)
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
    if writer and run and ddp.last_step:
        writer.close()
        run.finish()
        print(f"Loss: {ddp.last_step.metrics['loss']:.3f}, logged in {args.directory}")
    sl.shutdown()


if __name__ == "__main__":
    main()
