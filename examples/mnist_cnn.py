"""Train a CNN with BatchNorm on 5,000 real handwritten digits, on any number of processes.

syncline run -n 2 examples/mnist_cnn.py
torchrun --nproc-per-node 2 examples/mnist_cnn.py
python examples/mnist_cnn.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from example_data import mnist_digits
from progress import Progress, synchronized

NUM_TRAINING_SAMPLES = 4000  # of 5,000; the others are held out


class MnistCNN(nn.Module):
    """A network of two convolutions and two linear layers, with 106 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:  # (batch, 1, 28, 28) -> (batch, 10)
        x = F.max_pool2d(self.norm1(self.conv1(images)).relu(), 2)  # (batch, 16, 14, 14)
        x = F.max_pool2d(self.norm2(self.conv2(x)).relu(), 2)  # (batch, 32, 7, 7)
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def split_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out digits. The split is the same on every rank and in every run."""
    images, labels = mnist_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[:NUM_TRAINING_SAMPLES], order[NUM_TRAINING_SAMPLES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(
        images[held_out], labels[held_out]
    )


def shifted(images: Tensor) -> Tensor:
    """Move each image by up to two pixels, so that the network cannot memorize the images."""
    padded = F.pad(images, (2, 2, 2, 2))  # (batch, 1, 32, 32)
    corners = torch.randint(0, 5, (len(images), 2)).tolist()
    return torch.stack(
        [image[:, y : y + 28, x : x + 28] for image, (y, x) in zip(padded, corners, strict=True)]
    )


def count_correct(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(dim=1) == labels).sum())


def train(ddp: sl.DistributedDataParallel, dataset: TensorDataset, args: argparse.Namespace) -> None:
    world = sl.world()
    # The sampler divides the samples among the ranks, and shuffles them anew in each epoch.
    loader = DataLoader(
        dataset,
        batch_size=max(1, args.batch_size // world.size),
        sampler=sl.DistributedSampler(dataset, seed=args.seed),
    )
    num_steps = args.epochs * len(loader)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=num_steps, pct_start=0.2)
    with Progress(num_steps, shown=world.rank == 0) as progress:
        for epoch in range(1, args.epochs + 1):
            start = time.perf_counter()
            loss_sum, num_correct, num_samples = 0.0, 0.0, 0
            ddp.train()
            for images, labels in loader:
                images, labels = images.to(world.device), labels.to(world.device)
                logits = ddp(shifted(images))
                loss = F.cross_entropy(logits, labels)
                num_right = count_correct(logits, labels)
                # Each rank knows only its own samples. The means over all ranks are sent with the gradients.
                ddp.report(loss=loss, accuracy=num_right / len(labels), weight=len(labels))
                optimizer.zero_grad()
                loss.backward()  # while it runs, the gradients are averaged over the ranks
                optimizer.step()
                schedule.step()

                num_samples += len(labels)
                record = ddp.last_step
                assert record is not None
                loss_sum += record.metrics["loss"] * len(labels)
                num_correct += record.metrics["accuracy"] * len(labels)
                progress.advance(f"epoch {epoch}/{args.epochs}  loss {loss_sum / num_samples:.3f}")

            rate = num_samples * world.size / (time.perf_counter() - start)
            progress.print(
                f"epoch {epoch:>2}/{args.epochs}  loss {loss_sum / num_samples:.3f}  "
                f"accuracy {num_correct / num_samples:6.1%}  {rate:,.0f} samples/s"
            )


@torch.no_grad()
def held_out_accuracy(ddp: sl.DistributedDataParallel, dataset: TensorDataset) -> float:
    # pad=False: each sample counts once; with padding, some would count twice.
    loader = DataLoader(
        dataset, batch_size=250, sampler=sl.DistributedSampler(dataset, shuffle=False, pad=False)
    )
    num_correct, num_samples = 0, 0
    ddp.eval()
    device = sl.world().device
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        # The first forward after a training step gives all ranks rank 0's BatchNorm statistics.
        num_correct += count_correct(ddp(images), labels)
        num_samples += len(labels)
    return sl.mean(num_correct / num_samples, weight=num_samples)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CNN on 5,000 MNIST digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-accuracy", type=float, help="fail below this held-out accuracy, say 0.97")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = sl.init()
    if "OMP_NUM_THREADS" not in os.environ:  # not set: divide the cores among the ranks
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    training, held_out = split_digits()

    torch.manual_seed(args.seed)
    ddp = sl.DistributedDataParallel(MnistCNN().to(world.device))
    torch.manual_seed(1000 * args.seed + world.rank)  # from here on, each rank shifts its images differently
    start = time.perf_counter()
    train(ddp, training, args)
    contract, last_step = ddp.contract, ddp.explain()
    accuracy = held_out_accuracy(ddp, held_out)
    seconds = time.perf_counter() - start
    if world.rank == 0:
        print(f"\n{contract}\n\n{last_step}\n\n{synchronized(ddp.statistics(), seconds)}\n")
        print(f"Held-out accuracy: {accuracy:.1%} of {len(held_out):,} digits, after {seconds:.0f} s")
    sl.shutdown()
    if args.target_accuracy is not None and accuracy < args.target_accuracy:
        sys.exit(f"Held-out accuracy {accuracy:.1%} is below the target of {args.target_accuracy:.1%}.")


if __name__ == "__main__":
    main()
