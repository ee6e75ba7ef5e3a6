"""Search hyperparameters with Optuna, each trial on all ranks. Trials are pruned or fail on all ranks together.

syncline run -n 2 examples/optuna_search.py
"""

from __future__ import annotations

import argparse
import math

import optuna
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl


def from_rank_0(value: float) -> float:
    """Return rank 0's value on every rank."""
    return float(sl.broadcast_(torch.tensor(value, dtype=torch.float64)))


def samples() -> TensorDataset:
    """Points in a square, and whether each is inside of a ring."""
    points = 2 * torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) - 1
    return TensorDataset(points, ((points.norm(dim=1) - 0.6).abs() < 0.2).float())


def objective(trial: optuna.Trial | None, num_epochs: int) -> float:
    """Train a network with the hyperparameters of a trial. Return its loss, or raise TrialPruned on every rank.

    Args:
        trial: the trial on rank 0, None on all other ranks.
        num_epochs: the number of epochs of a trial that is not pruned.
    """
    lr = from_rank_0(trial.suggest_float("lr", 1e-3, 1e2, log=True) if trial else 0.0)
    width = int(from_rank_0(trial.suggest_int("width", 4, 64, log=True) if trial else 0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
    ddp = sl.DistributedDataParallel(
        net, on_nonfinite="raise"
    )  # on every rank, if a gradient of any rank is NaN
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    dataset = samples()
    loader = DataLoader(dataset, batch_size=32, sampler=sl.DistributedSampler(dataset))
    mean = math.inf
    for epoch in range(num_epochs):
        losses = [step(ddp, optimizer, points, inside) for points, inside in loader]
        mean = sl.mean(sum(losses) / len(losses))
        if trial is not None:
            trial.report(mean, epoch)
        if from_rank_0(
            trial.should_prune() if trial else False
        ):  # rank 0 decides, so all ranks leave together
            raise optuna.TrialPruned
    return mean


def step(
    ddp: sl.DistributedDataParallel, optimizer: torch.optim.Optimizer, points: Tensor, inside: Tensor
) -> float:
    optimizer.zero_grad()
    loss = (ddp(points)[:, 0] - inside).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--storage", help="an Optuna storage, such as sqlite:///study.db, to continue a study"
    )
    args = parser.parse_args()
    world = sl.init()
    study = None
    if world.rank == 0:  # only rank 0 has a study, so only rank 0 needs the storage
        study = optuna.create_study(
            study_name="ring",
            storage=args.storage,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
        )
    for _ in range(args.trials):
        trial = study.ask() if study else None
        state, value = optuna.trial.TrialState.FAIL, None
        try:
            value = objective(trial, args.epochs)
            state = optuna.trial.TrialState.COMPLETE
        except optuna.TrialPruned:
            state = optuna.trial.TrialState.PRUNED
        except sl.NonFiniteGradient:
            pass  # the loss of this trial became NaN or infinite: the next trial may be better
        finally:
            if study and trial:
                study.tell(trial, value, state)
    if study:
        counts = [
            f"{state.name} {len(study.get_trials(states=[state]))}" for state in optuna.trial.TrialState
        ]
        print(f"Trials: {', '.join(counts)}")
        print(f"Best loss: {study.best_value:.4f} with {study.best_params}")
    sl.shutdown()


if __name__ == "__main__":
    main()
