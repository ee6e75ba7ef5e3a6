"""What sl.ReplicaCheck costs, by size of the model: a step with it, and without. And what a look at the replicas costs.

    syncline run -n 2 benchmarks/replica_check.py [--every 100] [--rounds 20] [--json FILE]
    syncline run -n 2 benchmarks/replica_check.py --quick      # 2 short rounds: does it run?

Each rank trains two replicas of a model, one of which is compared with the other ranks'; they take turns, in another
order in each round. The ratio is the median over rounds of the two times of one round, its 95 % interval is
bootstrapped over rounds. "in the check" is what one rank's own clock says of the three calls that the check consists of
(hashing a slice, its fingerprint, comparing all ranks'), as a share of the step: more exact than a difference of two
large numbers. AdamW's state is compared, too. "a look" is what the default of `replica_check` does in the steps 1, 2,
4, 8 and so on, as a share of such a step: hashing all parameters, and the word of the rider. One thread a rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import syncline as sl
from models import CNN, GPT, SIZES, Chain, random_batch, random_images
from rounds import RoundsParser, take_turns
from syncline.tools.bench.results import ratio
from tables import table

WITHOUT, WITH = "without", "with"
GOAL_SHARE = 0.01
"""Of a step."""

GOAL_SHARE_OF_A_LOOK = 0.03
"""Of a step that looks."""


def cases(*, quick: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]]:
    """Models and what they are called with."""
    rank = sl.world().rank
    found: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
        "CNN with BatchNorm": (lambda: CNN(), random_images(seed=rank)),
        "500 small parameters": (lambda: Chain(num_parameters=500), (torch.randn(16, 16),)),
    }
    for size in ("0.3M",) if quick else ("0.3M", "5M", "19M"):
        config = SIZES[size]
        found[f"GPT {size}"] = (partial(GPT, config), random_batch(config, seed=rank))
    return found


class Timed:
    """Seconds spent in some methods of an object."""

    def __init__(self, one: Any, *methods: str) -> None:
        self.seconds = 0.0
        for method in methods:
            setattr(one, method, self._timed(getattr(one, method)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(
    make: Callable[[], nn.Module], inputs: tuple[Any, ...], *, every: int, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Seconds a step, by competitor and round; and the share of the check."""
    torch.manual_seed(0)
    ddps = {
        WITHOUT: sl.DistributedDataParallel(make(), replica_check=None),
        WITH: sl.DistributedDataParallel(make(), replica_check=sl.ReplicaCheck(every=every)),
    }
    optimizers = {name: ddp.attach(torch.optim.AdamW(ddp.parameters())) for name, ddp in ddps.items()}

    def step_of(name: str) -> Callable[[], None]:
        def step() -> None:
            optimizers[name].zero_grad()
            ddps[name](*inputs).backward()
            optimizers[name].step()

        return step

    steps = {name: step_of(name) for name in ddps}
    for _ in range(3):  # so that optimizer state is there, and what there is has been listed
        steps[WITH]()
    gradients = ddps[WITH]._replica.gradients
    watch = gradients.riders.replicas.watch
    assert watch is not None
    timed = Timed(watch, "begin", "buffers_are_equal", "fingerprint", "compare", "mean_is")
    gc.collect()
    gc.disable()  # a pass over all objects would be charged to whoever makes the next one
    before = gradients.state.num_backwards
    seconds = take_turns(steps, num_rounds=num_rounds, num_steps=num_steps, world=sl.world())
    gc.enable()
    num_checked = gradients.state.num_backwards - before
    return {
        "parameters": sum(p.numel() for p in ddps[WITH].parameters()),
        "seconds": seconds,
        "check_seconds": timed.seconds / num_checked,
        "look_seconds": look_seconds(sl.DistributedDataParallel(make())),
    }


def look_seconds(ddp: Any) -> float:
    """The median time of a look on this rank."""
    gradients = ddp._replica.gradients
    look, found = gradients.riders.look, []
    for _ in range(30):
        look.restart()
        start = time.perf_counter()
        look.begin_step(1)
        look.word(gradients.reduction.backward)
        found.append(time.perf_counter() - start)
    look.restart()
    return statistics.median(found)


def parse_arguments() -> argparse.Namespace:
    parser = RoundsParser(__doc__, rounds=20, quick=2)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="of one turn; 0: about half a second's")
    return parser.parse_figures()


def main() -> None:
    arguments = parse_arguments()
    world = sl.init(device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/replica_check.py")
    torch.set_num_threads(1)
    found = {}
    titles = ["model", "parameters", "ms a step", "with the check", "in the check", f"goal: {GOAL_SHARE:.0%}"]
    rows = [[*titles, "a look", f"goal: {GOAL_SHARE_OF_A_LOOK:.0%}"]]
    for name, (make, inputs) in cases(quick=arguments.quick).items():
        num_steps = 2 if arguments.quick else arguments.steps or (4 if "19M" in name else 16)
        one = measure(make, inputs, every=arguments.every, num_rounds=arguments.rounds, num_steps=num_steps)
        found[name] = one
        middle, low, high = ratio(one["seconds"][WITH], one["seconds"][WITHOUT])
        step_seconds = statistics.median(one["seconds"][WITHOUT])
        share = one["check_seconds"] / step_seconds
        rows.append(
            [
                name,
                f"{one['parameters']:,}",
                f"{step_seconds * 1e3:.2f}",
                f"{middle:.3f} [{low:.3f}, {high:.3f}]",
                f"{share:.2%} ({one['check_seconds'] * 1e6:.0f} us)",
                "met" if share <= GOAL_SHARE else "not met",
                f"{one['look_seconds'] / step_seconds:.2%} ({one['look_seconds'] * 1e6:.0f} us)",
                "met" if one["look_seconds"] <= GOAL_SHARE_OF_A_LOOK * step_seconds else "not met",
            ]
        )
    if world.rank == 0:
        print(f"every={arguments.every}, {world.size} ranks, {sl.DistributedDataParallel.__name__}")
        print(table(rows))
        if arguments.json:
            arguments.json.write_text(json.dumps(found))
    sl.shutdown()


if __name__ == "__main__":
    main()
