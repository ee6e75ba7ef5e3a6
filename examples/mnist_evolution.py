"""Train a small network on 5,000 real handwritten digits without a backward pass: the ranks send only losses.

syncline run -n 2 examples/mnist_evolution.py
torchrun --nproc-per-node 2 examples/mnist_evolution.py
python examples/mnist_evolution.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from mnist_cnn import split_digits
from progress import Progress, synchronized

REPORTS = 10


class SmallNet(nn.Sequential):
    """A network with one hidden layer over 14 x 14 pixels: 6,634 parameters, few enough for 64 directions in a step."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(14 * 14, 32), nn.Tanh(), nn.Linear(32, 10))


def halved(dataset: TensorDataset) -> TensorDataset:
    images, labels = (tensor.to(sl.world().device) for tensor in dataset.tensors)
    return TensorDataset(F.avg_pool2d(images, 2), labels)  # (n, 1, 14, 14)


def train(strategy: sl.EvolutionStrategy, dataset: TensorDataset, args: argparse.Namespace) -> None:
    images, labels = dataset.tensors
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(strategy.optimizer, args.steps)
    # All members of a step get the same batch, on all ranks, because their losses are compared with each other.
    batches = torch.Generator().manual_seed(args.seed)
    start = time.perf_counter()
    with Progress(args.steps, shown=sl.world().rank == 0) as progress:
        for step in range(1, args.steps + 1):
            batch = torch.randint(len(labels), (args.batch_size,), generator=batches)
            x, y = images[batch], labels[batch]

            def loss_fn(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
                return F.cross_entropy(model(x), y)

            record = strategy.step(loss_fn)
            schedule.step()

            status = f"step {step:,}/{args.steps:,}  loss {record.mean_loss:.3f}"
            progress.advance(status)
            if step % max(1, args.steps // REPORTS) == 0:
                rate = step * args.population / (time.perf_counter() - start)
                progress.print(f"{status}  best member {record.best_loss:.3f}  {rate:,.0f} members/s")


@torch.no_grad()
def held_out_accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    # Every rank has the same parameters, bit for bit, so each rank can evaluate alone.
    images, labels = dataset.tensors
    return int((model(images).argmax(dim=1) == labels).sum()) / len(labels)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on 5,000 MNIST digits without a backward pass.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--population", type=int, default=128, help="evaluations per step, over all ranks")
    parser.add_argument("--batch-size", type=int, default=256, help="digits that each member is tried on")
    parser.add_argument(
        "--sigma", type=float, default=0.02, help="how far the members are from the parameters"
    )
    parser.add_argument(
        "--lr", type=float, default=0.02, help="the learning rate that the schedule begins with"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-accuracy", type=float, help="fail below this held-out accuracy, say 0.85")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = sl.init()
    if "OMP_NUM_THREADS" not in os.environ:  # not set: divide the cores among the ranks
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    training, held_out = map(halved, split_digits())

    torch.manual_seed(args.seed)
    model = SmallNet().to(world.device)
    strategy = sl.EvolutionStrategy(
        model, args.sigma, args.lr, args.population, args.seed, optimizer=torch.optim.Adam
    )
    if world.rank == 0:
        print(f"{strategy.contract}\n", flush=True)

    start = time.perf_counter()
    train(strategy, training, args)
    seconds = time.perf_counter() - start
    accuracy = held_out_accuracy(model, held_out)
    if world.rank == 0:
        print(f"\n{synchronized(strategy.statistics(), seconds)}\n")
        print(f"Held-out accuracy: {accuracy:.1%} of {len(held_out):,} digits, after {seconds:.0f} s")
    sl.shutdown()
    if args.target_accuracy is not None and accuracy < args.target_accuracy:
        sys.exit(f"Held-out accuracy {accuracy:.1%} is below the target of {args.target_accuracy:.1%}.")


if __name__ == "__main__":
    main()
