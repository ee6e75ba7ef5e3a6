"""How long does a training step take, against torch's DistributedDataParallel?

    syncline run -n 2 benchmarks/step.py [--sizes 0.3M 5M 19M] [--rounds 40] [--json out.json]
    syncline run -n 1 benchmarks/step.py      # alone: against the bare module
    syncline run -n 1 benchmarks/step.py --device cuda --steps 20      # on a GPU: torch's class over NCCL as well
    syncline run -n 2 benchmarks/step.py --device cuda:0 --steps 5      # two ranks on one GPU, over Gloo
    syncline run -n 2 benchmarks/step.py --variants [static-graph batch-norm ...] [--sizes 0.3M]
    syncline run -n 2 benchmarks/step.py --variants --quick      # does it all run?

Every competitor trains a copy of the same model with fused AdamW in the same processes; torch's class over Gloo, ours
over the transport that the first line names (shared memory, where the ranks are on one host). They take turns, a few
steps each, round by round, so that a drift of the machine's speed meets all of them. A round's time is the slowest
rank's. A ratio is the median over rounds of the two times of one round; its 95 % confidence interval is bootstrapped
over rounds.

Without --variants the model is a GPT and torch's class runs with and without gradient_as_bucket_view, and the better
one is what all are divided by; the last line divides our better one by it. "exposed" is what a step takes longer than
one of the module alone, which synchronizes nothing, in percent of that. Part of it no synchronization can avoid: ranks
that wait for each other in every step take the sum of the slowest steps. The row "not synchronized, in step" shows it:
its ranks reduce one number after each backward. Our class with sharded=True is a row as well.
On a GPU, the clock stops when the GPU has finished the last step of a turn, so steps of one turn overlap as they do in
training.

With --variants, each variant of `step_variants.py` is a row: both classes are given the same model and the same
switches.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import syncline as sl
from models import GPT, SIZES, random_batch
from rounds import LOCAL, Figure, settings_of, take_turns, write_figures
from step_variants import GOAL, VARIANTS, steps_of, verdict
from syncline.session import transport_of
from syncline.tools.bench.results import quotients, ratio

Wrap = Callable[[nn.Module], nn.Module]

OURS, BUCKET_VIEW, SHARDED = "syncline", "syncline, bucket view", "syncline, sharded"
BARE, IN_STEP, THEIRS = LOCAL, f"{LOCAL}, in step", ("torch DDP", "torch DDP, bucket view")

MOST_EXPOSED_PERCENT = {"5M": 4.0, "19M": 2.0}
"""With bucket views, by size; sharded: 0 at the same sizes."""


def wrappers(num_ranks: int, device: torch.device) -> dict[str, Wrap]:
    """How each competitor wraps the module."""
    ours: dict[str, Wrap] = {
        OURS: lambda m: sl.DistributedDataParallel(m),
        BUCKET_VIEW: lambda m: sl.DistributedDataParallel(m, gradient_as_bucket_view=True),
    }
    bare: dict[str, Wrap] = {BARE: lambda m: m}
    if num_ranks == 1 and device.type == "cpu":
        return bare | ours
    torch_ddp = torch.nn.parallel.DistributedDataParallel
    theirs: dict[str, Wrap] = {
        THEIRS[0]: lambda m: torch_ddp(m),
        THEIRS[1]: lambda m: torch_ddp(m, gradient_as_bucket_view=True),
    }
    if num_ranks == 1:
        return bare | theirs | ours
    ours[SHARDED] = lambda m: sl.DistributedDataParallel(m, sharded=True)
    return bare | {IN_STEP: lambda m: m} | theirs | ours


class Competitor:
    """A replica and its optimizer.

    Args:
        module: what is trained.
        wrap: makes it a replica.
        attaches: whether the wrapper has to know of the optimizer.
        waits: whether the ranks reduce one number after each backward.
    """

    def __init__(self, module: nn.Module, wrap: Wrap, *, attaches: bool = False, waits: bool = False) -> None:
        self.module = wrap(module)
        self.number = torch.zeros(1, device=next(module.parameters()).device) if waits else None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        if attaches:
            assert isinstance(self.module, sl.DistributedDataParallel)
            self.optimizer = self.module.attach(self.optimizer)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.module(*batch).backward()
        if self.number is not None:
            sl.all_reduce_(self.number, "mean")
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch_of(size: str, world: sl.World) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's batch, on its device."""
    tokens, targets = random_batch(SIZES[size], seed=world.rank)
    return tokens.to(world.device), targets.to(world.device)


def in_turn(step: Callable[[], None], num_steps: int, device: torch.device) -> None:
    """Make steps, and wait until the device has finished them."""
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(size: str, *, num_rounds: int, num_steps: int, world: sl.World) -> dict[str, list[float]]:
    """Seconds a step, by competitor and round, of the slowest rank."""
    torch.manual_seed(0)
    base = GPT(SIZES[size]).to(world.device)
    batch = batch_of(size, world)
    competitors = {
        name: Competitor(copy.deepcopy(base), wrap, attaches=name == SHARDED, waits=name == IN_STEP)
        for name, wrap in wrappers(world.size, world.device).items()
    }
    turns = {
        name: partial(in_turn, partial(competitor.step, batch), num_steps, world.device)
        for name, competitor in competitors.items()
    }
    seconds = take_turns(turns, num_rounds=num_rounds, num_steps=1, world=world)
    return {name: [turn / num_steps for turn in rounds] for name, rounds in seconds.items()}


def figures_of(size: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """What is compared between two measurements."""
    if any(name not in seconds for name in THEIRS):
        values = quotients(seconds[OURS], seconds[BARE])
        return [Figure(f"step of GPT {size}, 1 rank: {OURS} / {BARE}", values)]
    rival = min(THEIRS, key=lambda name: statistics.median(seconds[name]))
    best = min((OURS, BUCKET_VIEW), key=lambda name: statistics.median(seconds[name]))
    values = quotients(seconds[best], seconds[rival])
    figures = [Figure(f"step of GPT {size}: syncline / torch", values)]
    most = MOST_EXPOSED_PERCENT.get(size)
    for name, goal in ((BUCKET_VIEW, most), (SHARDED, None if most is None else 0.0)):
        if name in seconds:
            values = [100 * (one - 1) for one in quotients(seconds[name], seconds[BARE])]
            what = f"step of GPT {size}: exposed, {name}"
            figures.append(Figure(what, values, at_most=goal, form="{:+.1f} %"))
    values = quotients(seconds[OURS], seconds[BUCKET_VIEW])
    return [*figures, Figure(f"step of GPT {size}: default / bucket view", values, at_most=1.01)]


def count_python_calls(size: str, world: sl.World) -> tuple[int, int, int]:
    """Python functions of this package that one step calls, with the number of parameters and buckets."""
    competitor = Competitor(GPT(SIZES[size]).to(world.device), lambda m: sl.DistributedDataParallel(m))
    batch = batch_of(size, world)
    for _ in range(4):  # the look at replicas is in steps 1, 2, 4, 8, ...: the fifth one is like most
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
    theirs = [name for name in medians if "syncline" not in name and name not in (BARE, IN_STEP)]
    rival = min(theirs or [BARE], key=lambda name: medians[name])
    num_parameters = sum(p.numel() for p in GPT(SIZES[size]).parameters())
    print(f"\nGPT {size} ({num_parameters / 1e6:.2f} M parameters): ratio to {rival}")
    rows: dict[str, Any] = {}
    for name, median in medians.items():
        middle, low, high = ratio(seconds[name], seconds[rival])
        rows[name] = {"median_ms": median * 1e3, "ratio": middle, "ratio_low": low, "ratio_high": high}
        line = f"  {name:26} {median * 1e3:8.2f} ms   {middle:.3f}  [{low:.3f}, {high:.3f}]"
        if BARE not in (name, rival):
            exposed = [x - 1 for x in ratio(seconds[name], seconds[BARE])]
            rows[name] |= dict(zip(("exposed", "exposed_low", "exposed_high"), exposed, strict=True))
            line += "   exposed {:6.1%}  [{:.1%}, {:.1%}]".format(*exposed)
        print(line)
    ours = [name for name in medians if "syncline" in name and name != SHARDED]
    best = min(ours, key=lambda name: medians[name])
    middle, low, high = ratio(seconds[best], seconds[rival])
    print(f"  the better of each: {best} / {rival} = {middle:.3f}  [{low:.3f}, {high:.3f}]")
    num_calls, num_gradients, num_buckets = calls
    print(f"  Python calls a step: {num_calls} for {num_gradients} gradients in {num_buckets} buckets")
    return {
        "rival": rival,
        "best": best,
        "competitors": rows,
        "python_calls": num_calls,
        "num_gradients": num_gradients,
    }


def compare_variants(
    names: Sequence[str], sizes: Sequence[str], *, num_rounds: int, num_steps: int, world: sl.World
) -> list[dict[str, Any]]:
    """Measure each variant at each size and print a row for it; return what the table shows."""
    if world.rank == 0:
        print(f"\n{'variant':22} {'GPT':>5} {'syncline':>9} {'torch':>9}   ratio  [95 %]           <= {GOAL}")
    rows = []
    for name in names:
        variant = VARIANTS[name]
        for size in sizes if variant.has_sizes else sizes[:1]:
            steps = steps_of(variant, SIZES[size], rank=world.rank)
            seconds = take_turns(steps, num_rounds=num_rounds, num_steps=num_steps, world=world)
            ours, theirs = (statistics.median(seconds[who]) * 1e3 for who in ("syncline", "torch"))
            middle, low, high = ratio(seconds["syncline"], seconds["torch"])
            row = {
                "variant": name,
                "size": size if variant.has_sizes else None,
                "syncline_ms": ours,
                "torch_ms": theirs,
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
                "goal": verdict(low, high),
            }
            rows.append(row)
            if world.rank == 0:
                print(
                    f"{name:22} {row['size'] or '':>5} {ours:6.2f} ms {theirs:6.2f} ms   {middle:.3f}  "
                    f"[{low:.3f}, {high:.3f}]   {row['goal']}",
                    flush=True,
                )
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="of the GPT (all; 0.3M for variants)")
    parser.add_argument(
        "--variants",
        nargs="*",
        choices=list(VARIANTS),
        metavar="NAME",
        help=f"compare the classes switch by switch: some or all of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--rounds", type=int, help="40")
    parser.add_argument("--steps", type=int, help="steps of one competitor in one round (2)")
    parser.add_argument(
        "--device", default="cpu", help="cuda: a GPU for each rank; cuda:0: one for all (cpu)"
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 step: figures without meaning")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 40)
    arguments.steps = arguments.steps or (1 if arguments.quick else 2)
    if arguments.sizes is None:
        arguments.sizes = list(SIZES) if arguments.variants is None else ["0.3M"]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    world = sl.init(device=arguments.device)
    if arguments.variants is not None and world.size == 1:
        sys.exit(
            "--variants: torch's class needs a process group: syncline run -n 2 benchmarks/step.py --variants"
        )
    name_of_transport = transport_of(None).name
    if world.rank == 0:
        gpu = f"{torch.cuda.get_device_name(world.device)}, " if world.device.type == "cuda" else ""
        print(
            f"{world.size} rank(s) x 1 thread, {os.cpu_count()} cores ({platform.machine()}), {gpu}"
            f"torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps, "
            f"syncline over {name_of_transport}"
        )
    results: dict[str, Any] = {"num_ranks": world.size}
    figures: list[Figure] = []
    often = {"num_rounds": arguments.rounds, "num_steps": arguments.steps}
    if arguments.variants is None:
        results["sizes"] = {}
        for size in arguments.sizes:
            seconds = measure(size, **often, world=world)
            calls = count_python_calls(size, world)
            if world.rank == 0:
                results["sizes"][size] = report(size, seconds, calls)
                figures += figures_of(size, seconds)
    else:
        names = arguments.variants or list(VARIANTS)
        results["variants"] = compare_variants(names, arguments.sizes, **often, world=world)
    if world.rank == 0:
        write_figures(arguments, figures, settings_of(world), **results)
    sl.shutdown()


if __name__ == "__main__":
    main()
