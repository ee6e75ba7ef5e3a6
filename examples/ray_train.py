"""Train with Ray Train on one or two workers, and continue on fewer or more workers if a node is lost or added.

pip install "ray[train]"
python examples/ray_train.py
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl


def spirals(num_samples: int = 960) -> TensorDataset:
    """Points on two interleaved spirals, and the spiral (0 or 1) of each point."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 2
    radius = torch.rand(num_samples, generator=generator).sqrt()
    angle = 2 * math.pi * radius + math.pi * labels
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)  # (num_samples, 2)
    return TensorDataset(4 * points, labels.float())


def train_func(config: dict[str, Any]) -> None:
    """Train on this worker. Ray calls this function on all workers, and again after a failure."""
    world = sl.init()  # Ray has initialised torch.distributed: its group is used
    sampler = sl.DistributedSampler(config["dataset"])
    loader = DataLoader(config["dataset"], batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.02))
    state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
    checkpointer = sl.Checkpointer(config["directory"], keep=2)
    checkpointer.load(state)  # after a failure, also on fewer or more workers than before

    if world.rank == 0:
        print(f"{ddp.contract}\n{world.size} workers start at step {state.step}", flush=True)
    for epoch in range(sampler.epoch, config["epochs"]):
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(ddp(points)[:, 0], labels)
            ddp.report(loss=loss)
            loss.backward()
            optimizer.step()
            state.commit(len(points))
            if state.step % 10 == 0:
                saved = checkpointer.save(state)
                report(saved, {"epoch": epoch, "step": state.step, "workers": world.size} | metrics_of(ddp))


def metrics_of(ddp: sl.DistributedDataParallel) -> dict[str, float]:
    """The means over all workers of what was given to `ddp.report` in the last step."""
    return {} if ddp.last_step is None else dict(ddp.last_step.metrics)


def report(saved: str | None, metrics: dict[str, float]) -> None:
    """Pass metrics and the directory of a save to Ray, which attaches metrics to checkpoints only."""
    checkpoint = None if saved is None else Checkpoint.from_directory(saved)
    ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def train(directory: str, *, num_workers: int | tuple[int, int], **config: Any) -> Result:
    """Train on a Ray cluster, which Ray starts on this machine if there is none.

    Args:
        directory: a directory that all nodes see.
        num_workers: the number of workers, or the smallest and the largest number.
        config: `dataset` and `epochs`.
    """
    trainer = TorchTrainer(
        train_func,
        # Ray accepts saves in its own directory of the run only.
        train_loop_config={"dataset": spirals(), "epochs": 6, "directory": f"{directory}/spirals/saves"}
        | config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="spirals", storage_path=directory, failure_config=FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(train(directory, num_workers=(1, 2)).metrics)


if __name__ == "__main__":
    main()
