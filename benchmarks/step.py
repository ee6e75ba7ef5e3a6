"""How long does a training step take, against torch's DistributedDataParallel?

    syncline run -n 2 benchmarks/step.py [--sizes 0.3M 5M 19M] [--rounds 40] [--json out.json]
    syncline run -n 1 benchmarks/step.py      # alone: against the bare module

Every variant trains a copy of the same GPT with fused AdamW in the same processes over the same process group. They
take turns, a few steps each, round by round, so that a drift of the machine's speed meets all of them. A
round's time is the slowest rank's. A ratio is the median over rounds of the two times of one round; its 95 %
confidence interval is bootstrapped over rounds. torch's class runs with and without gradient_as_bucket_view,
and the better one is what all are divided by; the last line divides our better one by it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from models import GPT, SIZES, random_batch

Wrap = Callable[[nn.Module], nn.Module]


def variants(num_ranks: int) -> dict[str, Wrap]:
    """How each competitor wraps the module."""
    ours: dict[str, Wrap] = {
        "syncline": lambda m: sl.DistributedDataParallel(m),
        "syncline, bucket view": lambda m: sl.DistributedDataParallel(m, gradient_as_bucket_view=True),
    }
    bare: dict[str, Wrap] = {"bare module": lambda m: m}
    if num_ranks == 1:
        return bare | ours
    torch_ddp = torch.nn.parallel.DistributedDataParallel
    theirs: dict[str, Wrap] = {
        "torch DDP": lambda m: torch_ddp(m),
        "torch DDP, bucket view": lambda m: torch_ddp(m, gradient_as_bucket_view=True),
    }
    return bare | theirs | ours


class Competitor:
    """One variant's replica, optimizer and times."""

    def __init__(self, module: nn.Module, wrap: Wrap) -> None:
        self.module = wrap(module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self.round_seconds: list[float] = []

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.module(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(size: str, *, num_rounds: int, num_steps: int, world: sl.World) -> dict[str, list[float]]:
    """Seconds a step, by variant and round, of the slowest rank."""
    torch.manual_seed(0)
    base = GPT(SIZES[size])
    batch = random_batch(SIZES[size], seed=world.rank)
    competitors = {name: Competitor(copy.deepcopy(base), wrap) for name, wrap in variants(world.size).items()}
    for round_index in range(-2, num_rounds):  # two rounds to warm up
        order = list(competitors)
        random.Random(round_index).shuffle(order)  # the same order on all ranks
        for name in order:
            competitor = competitors[name]
            sl.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                competitor.step(batch)
            if round_index >= 0:
                competitor.round_seconds.append((time.perf_counter() - start) / num_steps)
    mine = torch.tensor([c.round_seconds for c in competitors.values()], dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return dict(zip(competitors, mine.tolist(), strict=True))


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median of the paired ratios and its bootstrapped 95 % confidence interval."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[50], medians[1949]


def count_python_calls(size: str, world: sl.World) -> tuple[int, int, int]:
    """Python functions of this package that one step calls, with the number of parameters and buckets."""
    competitor = Competitor(GPT(SIZES[size]), lambda m: sl.DistributedDataParallel(m))
    batch = random_batch(SIZES[size], seed=world.rank)
    for _ in range(3):
        competitor.step(batch)
    package = str(Path(sl.__file__).parent)
    num_calls = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(profile)
    try:
        competitor.step(batch)
    finally:
        sys.setprofile(None)
    record = competitor.module.last_step
    assert isinstance(record, sl.BackwardRecord)
    return num_calls, record.num_gradients, len(record.buckets)


def report(size: str, seconds: dict[str, list[float]], calls: tuple[int, int, int]) -> dict[str, Any]:
    """Print one table; return what it shows."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    theirs = [name for name in medians if "syncline" not in name and name != "bare module"]
    rival = min(theirs or ["bare module"], key=lambda name: medians[name])
    num_parameters = sum(p.numel() for p in GPT(SIZES[size]).parameters())
    print(f"\nGPT {size} ({num_parameters / 1e6:.2f} M parameters): ratio to {rival}")
    rows: dict[str, Any] = {}
    for name, median in medians.items():
        middle, low, high = ratio(seconds[name], seconds[rival])
        rows[name] = {"median_ms": median * 1e3, "ratio": middle, "ratio_low": low, "ratio_high": high}
        print(f"  {name:24} {median * 1e3:8.2f} ms   {middle:.3f}  [{low:.3f}, {high:.3f}]")
    best = min((name for name in medians if "syncline" in name), key=lambda name: medians[name])
    middle, low, high = ratio(seconds[best], seconds[rival])
    print(f"  the better of each: {best} / {rival} = {middle:.3f}  [{low:.3f}, {high:.3f}]")
    num_calls, num_gradients, num_buckets = calls
    print(f"  Python calls a step: {num_calls} for {num_gradients} gradients in {num_buckets} buckets")
    return {
        "rival": rival,
        "best": best,
        "variants": rows,
        "python_calls": num_calls,
        "num_gradients": num_gradients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2, help="steps of one variant in one round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = sl.init()
    if world.rank == 0:
        print(
            f"{world.size} rank(s) x 1 thread, {os.cpu_count()} cores ({platform.machine()}), "
            f"torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps"
        )
    results = {}
    for size in arguments.sizes:
        seconds = measure(size, num_rounds=arguments.rounds, num_steps=arguments.steps, world=world)
        calls = count_python_calls(size, world)
        if world.rank == 0:
            results[size] = report(size, seconds, calls)
    if world.rank == 0 and arguments.json:
        arguments.json.write_text(json.dumps({"num_ranks": world.size, "sizes": results}, indent=2) + "\n")
    sl.shutdown()


if __name__ == "__main__":
    main()
