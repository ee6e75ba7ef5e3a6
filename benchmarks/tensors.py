"""How does the cost grow with the number of parameters, and what does the smallest step cost?

    syncline run -n 2 benchmarks/tensors.py [--counts 1000 10000 100000] [--sharded] [--json out.json]
    syncline run -n 1 benchmarks/tensors.py --tiny          # alone: against the bare module
    syncline run -n 2 benchmarks/tensors.py --quick         # does it all run?

A module of many tensors of four numbers is wrapped, trained for some steps, described, averaged, compared, saved and
loaded. Every row has the CPU time of one rank at each number of parameters, and the exponent e of the fit
time = c * number ** e: 1.0 is linear. Where torch's DistributedDataParallel has the operation, both take turns in
rounds, and the ratio of the two times of a round is shown with its quartiles, at the largest number at which torch's
class takes part. Its constructor needs time that grows with the square, a minute at 100,000; --torch-up-to says where
it stops.

With --tiny, a step of an MLP of six parameters, which takes about a millisecond, is compared instead: at one rank with
the bare module, otherwise with torch's class over Gloo.

CPU time is that of all threads of this rank. The collector of garbage runs between the measured calls, not in them.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from rounds import Figure, RoundsParser, exponent, settings_of, write_figures
from syncline.tools.bench.results import quotients

OURS, TORCH, BARE = "syncline", "torch", "bare module"

Times = dict[str, dict[str, list[float]]]
"""The seconds of each round, by operation and by competitor."""


class ManyTensors(nn.Module):
    """A module of many small parameters, whose forward takes as little time for each as torch allows."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(num_parameters)])

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * x).sum()


def mlp() -> nn.Module:
    """Return the model of the tiny step. It has six parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def timed(call: Callable[[], Any], num_calls: int = 1, *, num_before: int = 0) -> tuple[float, float, Any]:
    """Return the CPU seconds and the seconds of one call, and what it returns.

    Args:
        call: what is timed.
        num_calls: how often, in one measurement.
        num_before: how often before it, because a loop finds its own code and data in the caches.
    """
    sl.barrier()
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_before):
            call()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_calls):
            result = call()
        cpu, wall = time.process_time() - cpu_start, time.perf_counter() - start
        return cpu / num_calls, wall / num_calls, result
    finally:
        gc.enable()


def wrap(name: str, module: nn.Module, *, sharded: bool = False) -> nn.Module:
    """Wrap a module as this competitor does."""
    if name == OURS:
        return sl.DistributedDataParallel(module, sharded=sharded)
    return nn.parallel.DistributedDataParallel(module) if name == TORCH else module


def stepper(
    module: nn.Module, batch: Sequence[Tensor], loss: Callable[..., Tensor]
) -> tuple[Callable[[], None], Any]:
    """Return a function that makes one training step, and the optimizer."""
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    if isinstance(module, sl.DistributedDataParallel):
        optimizer = module.attach(optimizer)

    def step() -> None:
        loss(module(batch[0]), *batch[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


# ---------------------------------------------------------------------- many tensors


def measure(count: int, names: Sequence[str], *, num_rounds: int, sharded: bool, folder: Path) -> Times:
    """Measure every operation on a module of `count` parameters."""
    times: Times = {}

    def note(operation: str, name: str, seconds: float) -> None:
        times.setdefault(operation, {}).setdefault(name, []).append(seconds)

    for number in range(num_rounds):
        steps, wrapped = {}, {}
        for name in names if number % 2 else names[::-1]:
            module = ManyTensors(count)
            seconds, _, wrapped[name] = timed(partial(wrap, name, module, sharded=sharded))
            if name != BARE:
                note("construct", name, seconds)
            steps[name], optimizer = stepper(wrapped[name], [torch.ones(())], lambda output: output)
            if name == OURS:
                state = sl.TrainState(model=wrapped[name], optimizer=optimizer)
            for _ in range(
                2
            ):  # the first step learns the order of the buckets, and torch's second builds them again
                steps[name]()
        for _ in range(2):
            for name, step in steps.items():
                note("step", name, timed(step, 2)[0])
        for operation, call in operations(wrapped[OURS], state, folder / f"{count}-{number}").items():
            note(operation, OURS, timed(call)[0])
    return times


def operations(ddp: Any, state: sl.TrainState, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the operations that torch's class does not have."""
    checkpointer = sl.Checkpointer(folder)
    found: dict[str, Callable[[], Any]] = {
        "print explain()": lambda: str(ddp.explain()),
        "print contract": lambda: str(ddp.contract),
        "print last_step": lambda: str(ddp.last_step),
        "check_replicas": lambda: sl.check_replicas(ddp),
        "state_dict": ddp.state_dict,
        "Checkpointer.save": lambda: checkpointer.save(state, step=1),
        "Checkpointer.load": lambda: checkpointer.load(state),
    }
    if ddp._replica.sharding is None:
        drifting = sl.DistributedDataParallel(
            ManyTensors(len(list(ddp.parameters()))), strategy=sl.LocalSGD(2)
        )
        step, _ = stepper(drifting, [torch.ones(())], lambda output: output)
        found |= {
            "average_": lambda: sl.average_(ddp.module),
            "broadcast_": lambda: sl.broadcast_(ddp.module),
            "two steps, LocalSGD(2)": lambda: (step(), step()),
        }
    return found


def quartiles(values: Sequence[float]) -> str:
    """Return the median and the quartiles as text.

    Example:
        >>> quartiles([1.0, 2.0, 3.0])
        '2.000 [1.000, 3.000]'
    """
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def report(found: Mapping[int, Times]) -> list[Figure]:
    """Print one row for each operation; return the exponents, and the ratios to torch's class."""
    counts = list(found)
    print(
        f"{'CPU ms of one rank':24}"
        + "".join(f"{count:>11,}" for count in counts)
        + "   exponent   ratio to torch"
    )
    figures = []
    for operation in found[counts[0]]:
        for name in (OURS, TORCH, BARE):
            medians = {
                count: statistics.median(times[operation][name])
                for count, times in found.items()
                if name in times[operation]
            }
            if not medians:
                continue
            slope = exponent(medians)
            cells = "".join(f"{medians[c] * 1e3:11.2f}" if c in medians else f"{'':11}" for c in counts)
            line = f"{operation + ('' if name == OURS else f', {name}'):24}{cells}   {slope:8.2f}"
            if name == OURS:
                figures.append(Figure(f"{operation}: exponent", [slope], at_most=1.1))
                both = [count for count in counts if TORCH in found[count][operation]]
                for count in both:
                    here = found[count][operation]
                    values = quotients(here[OURS], here[TORCH])
                    goal = 1.0 if count >= 10_000 else None
                    figures.append(
                        Figure(f"{operation}, {count} parameters: syncline / torch", values, at_most=goal)
                    )
                if both:
                    line += f"   {quartiles(figures[-1].values)} at {both[-1]:,}"
            print(line)
    return figures


# ---------------------------------------------------------------------- the tiny step


def measure_tiny(rival: str, *, num_rounds: int, batch_size: int) -> list[Figure]:
    """Compare the tiny step with a rival's, print the comparison and return it."""
    world = sl.world()
    torch.manual_seed(world.rank)
    batch = [torch.randn(batch_size, 128), torch.randint(10, (batch_size,))]
    steps = {
        name: stepper(wrap(name, mlp()), batch, nn.functional.cross_entropy)[0] for name in (OURS, rival)
    }
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(-2, num_rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            cpu, wall, _ = timed(steps[name], 20, num_before=10)
            if number >= 0:
                rounds[name].append((cpu, wall))
    figures = []
    for at, kind in enumerate(("CPU", "wall")):
        ours, theirs = ([one[at] for one in rounds[name]] for name in (OURS, rival))
        figures.append(
            Figure(
                f"tiny step, {world.size} rank(s), {kind}: syncline / {rival}",
                quotients(ours, theirs),
                at_most=1.05 if rival == BARE else 0.9,
            )
        )
        if world.rank == 0:
            print(
                f"tiny step, {kind:4}: {statistics.median(ours) * 1e6:6.0f} us, {rival} "
                f"{statistics.median(theirs) * 1e6:6.0f} us, ratio {quartiles(figures[-1].values)}"
            )
    return figures


def main() -> None:
    """Measure, and print on rank 0."""
    parser = RoundsParser(__doc__, rounds=5, quick=1)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument(
        "--torch-up-to", type=int, default=10_000, help="the most parameters for torch's class"
    )
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch-size", type=int, default=250, help="of the tiny step: 250 takes about 1 ms")
    arguments = parser.parse_figures()
    torch.set_num_threads(1)
    world = sl.init()
    gc.freeze()
    if arguments.tiny:
        rival = TORCH if world.size > 1 else BARE
        figures = measure_tiny(rival, num_rounds=8 * arguments.rounds, batch_size=arguments.batch_size)
    else:
        counts = [20, 40] if arguments.quick else arguments.counts
        found = {}
        # The launcher is the parent of all ranks.
        folder = Path(tempfile.gettempdir()) / f"syncline-tensors-{os.getppid()}"
        for count in counts:
            has_torch = count <= arguments.torch_up_to and world.size > 1
            names = [OURS, TORCH, BARE] if has_torch else [OURS, BARE]
            found[count] = measure(
                count, names, num_rounds=arguments.rounds, sharded=arguments.sharded, folder=folder
            )
        sl.barrier()
        shutil.rmtree(folder, ignore_errors=True)
        figures = report(found) if world.rank == 0 else []
    if world.rank == 0:
        write_figures(arguments, figures, settings_of(world))
    sl.shutdown()


if __name__ == "__main__":
    main()
