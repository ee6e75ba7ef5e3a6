"""Evaluate with torchmetrics on all ranks: each sample counts once, and the result is that of one process.

syncline run -n 2 examples/torchmetrics_eval.py
torchrun --nproc-per-node 2 examples/torchmetrics_eval.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import syncline as sl

NUM_CLASSES = 4


def make_data(num_samples: int, *, seed: int) -> TensorDataset:
    """Make points around one center for each class."""
    centers = torch.randn(NUM_CLASSES, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(num_samples, 8, generator=generator), labels)


def train(ddp: sl.DistributedDataParallel, dataset: TensorDataset) -> None:
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    for inputs, labels in DataLoader(dataset, batch_size=16, sampler=sl.DistributedSampler(dataset)):
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs.to(sl.world().device)), labels.to(sl.world().device)).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset) -> dict[str, torch.Tensor]:
    """Return the metrics over the whole dataset, the same on all ranks."""
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro"),
            "auroc": MulticlassAUROC(NUM_CLASSES),
            "confusion": MulticlassConfusionMatrix(NUM_CLASSES),
        }
    ).to(sl.world().device)
    loss = MeanMetric().to(sl.world().device)
    # pad=False: ranks may have unequal numbers of samples. With padding, some samples would count twice.
    sampler = sl.DistributedSampler(dataset, shuffle=False, pad=False)
    for inputs, labels in DataLoader(dataset, batch_size=64, sampler=sampler):
        inputs, labels = inputs.to(sl.world().device), labels.to(sl.world().device)
        logits = model(inputs)
        metrics.update(logits.softmax(dim=1), labels)
        loss.update(F.cross_entropy(logits, labels, reduction="none"))
    # `compute` gathers the states of all ranks over torch.distributed's default group, which `sl.init` has made.
    return {**metrics.compute(), "loss": loss.compute()}


def main() -> None:
    world = sl.init()
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(nn.Linear(8, NUM_CLASSES).to(world.device))
    train(ddp, make_data(1000, seed=1))
    ddp.eval()
    found = evaluate(
        ddp.module, make_data(501, seed=2)
    )  # the bare module: an evaluation sends nothing but metrics
    if world.rank == 0:
        print({name: value.item() for name, value in found.items() if value.numel() == 1})
        print(f"{int(found['confusion'].sum())} samples, on {world.size} ranks")
    sl.shutdown()


if __name__ == "__main__":
    main()
