"""Competitors take turns, round by round, so that a drift of the machine's speed meets all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

import syncline as sl

__all__ = ["median_interval", "ratio", "take_turns"]


def take_turns(
    steps: Mapping[str, Callable[[], object]], *, num_rounds: int, num_steps: int, world: sl.World
) -> dict[str, list[float]]:
    """Seconds a step, by competitor and round, of the slowest rank.

    Args:
        steps: what makes one step of each competitor, the same ones on all ranks.
        num_rounds: rounds that count; two more come before them to warm up.
        num_steps: steps of one competitor in one round.
        world: the ranks.
    """
    mine: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(-2, num_rounds):
        order = list(steps)
        random.Random(round_index).shuffle(order)  # the same order on all ranks
        for name in order:
            step = steps[name]
            sl.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                step()
            if round_index >= 0:
                mine[name].append((time.perf_counter() - start) / num_steps)
    slowest = torch.tensor(list(mine.values()), dtype=torch.float64)  # (num_competitors, num_rounds)
    if world.size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(mine, slowest.tolist(), strict=True))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its bootstrapped 95 % confidence interval.

    Example:
        >>> median_interval([1.0] * 5)
        (1.0, 1.0, 1.0)
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios and its bootstrapped 95 % confidence interval."""
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
