"""How long does a training step take over a slow link, plain and compressed, against torch's DistributedDataParallel?

    sudo python benchmarks/slow_steps.py [--megabits 100] [--rounds 10] [--json FILE]
    sudo python benchmarks/slow_steps.py --quick      # does it run?

Two hosts with a rank each: network namespaces of this machine, joined by a cable of that speed (root, Linux). Each
competitor trains a GPT of its own, of 5 M parameters, as `slow_link.py` does, with one thread per rank. The competitors
take turns within one pair of processes, in another order in each round, and a round's time is that of the slowest rank.
All of them use the gradients' buckets as `.grad` (gradient_as_bucket_view=True). "not synchronized" has no wrapper.

The figures are medians and quartiles over rounds. "times as fast" is the median ratio to torch's class in one round,
with its bootstrapped 95 % interval. CPU time is that of rank 0, with the threads of its transports.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import syncline as sl
from goals import goals_table
from rounds import LOCAL, Figure, RoundsParser, write_figures
from slow_link import RANKS, RIVAL, Text, Trainer, Way, exits_without_hosts, ours, torch_ddp
from syncline.compression import PowerSGD, Quantize
from syncline.session import transport_of
from syncline.testing import simulated_hosts
from syncline.tools.bench.results import describe_machine, quotients, ratio
from syncline.tools.bench.timing import alternate, timer
from tables import table

GOALS = {"Quantize(4)": 5.0, "PowerSGD(2)": 15.0}
STEPS = 6
"""Steps of one turn. Torch's class, which is slow, makes one."""

compressed = partial(ours, gradient_as_bucket_view=True)
WAYS = [
    Way(name=LOCAL, wrap=lambda module: module, learning_rate=1e-3),
    Way(name=RIVAL, wrap=torch_ddp, learning_rate=1e-3),
    Way(name="Quantize(4)", wrap=compressed(compression=Quantize(4)), learning_rate=1e-3),
    Way(name="PowerSGD(2)", wrap=compressed(compression=PowerSGD(2)), learning_rate=1e-3),
]

Rounds = Mapping[str, Sequence[float]]
"""Seconds per step of each round, by competitor."""


def measure(arguments: argparse.Namespace) -> None:
    """As one of the ranks; rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    world = sl.init(device="cpu")
    transport = transport_of(None)
    text = Text()
    cpu_seconds: dict[str, list[float]] = {}

    def timed(way: Way) -> Callable[[int], float]:
        trainer = Trainer(way, text, arguments)
        seconds_for = timer(trainer.step, transport)
        of_rounds = cpu_seconds.setdefault(way.name, [])

        def seconds_of(num_steps: int) -> float:
            trainer.step()  # buckets that were not used for a while are in no cache
            cpu_began = time.process_time()
            seconds = seconds_for(num_steps)
            of_rounds.append((time.process_time() - cpu_began) / num_steps)
            return seconds

        return seconds_of

    timers = {way.name: timed(way) for way in WAYS if way.name in arguments.only}
    num_calls = {name: 1 if name == RIVAL and arguments.megabits else STEPS for name in timers}
    wall = alternate(timers, num_rounds=arguments.rounds, num_calls=num_calls, transport=transport)
    if world.rank == 0:
        cpu = {name: values[2:] for name, values in cpu_seconds.items()}  # two rounds warm up
        print(json.dumps({"seconds": wall, "cpu_seconds": cpu, "transport": transport.name}))
    sl.shutdown()


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let ranks on two hosts measure, and return what rank 0 has printed."""
    with simulated_hosts(megabits_per_second=arguments.megabits or None) as hosts:
        options = ("width", "layers", "rounds", "megabits")
        command = [sys.executable, __file__, "--only", *arguments.only]
        for name in options:
            command += [f"--{name}", str(getattr(arguments, name))]
        hosts.start(command, RANKS)
        outputs = hosts.outputs(timeout_seconds=3600)
    for rank, (code, _, err) in enumerate(outputs):
        if code:
            sys.exit(f"rank {rank} ended with {code}:\n{err}")
    found: dict[str, Any] = json.loads(outputs[0][1].splitlines()[-1])
    return found


def rows(wall: Rounds, cpu: Rounds) -> list[list[str]]:
    """Return a row for each competitor."""
    found = [["", "ms a step", "CPU ms", "times as fast as torch's class"]]
    for name, seconds in wall.items():
        middle, low, high = ratio(wall[RIVAL], seconds) if RIVAL in wall else (float("nan"),) * 3
        found.append(
            [name, quartiles(seconds), quartiles(cpu[name]), f"{middle:.1f} [{low:.1f}, {high:.1f}]"]
        )
    return found


def quartiles(seconds: Sequence[float]) -> str:
    """Format the median and the quartiles of times in milliseconds."""
    low, middle, high = statistics.quantiles([1e3 * one for one in seconds], n=4, method="inclusive")
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def figures_of(wall: Rounds, megabits: float) -> list[Figure]:
    """Return how many times as fast as torch's class each compression is. The goals are those for 100 Mbit/s."""
    return [
        Figure(
            f"step of GPT 5M at {megabits:g} Mbit/s: torch / {name}",
            quotients(wall[RIVAL], wall[name]),
            at_least=goal if megabits == 100 else None,
            form="{:.1f}",
        )
        for name, goal in GOALS.items()
        if name in wall and RIVAL in wall
    ]


def main() -> None:
    parser = RoundsParser(__doc__, rounds=10, quick=2)
    names = [way.name for way in WAYS]
    parser.add_argument("--megabits", type=float, default=100, help="a second, each way; 0 for no limit")
    parser.add_argument("--width", type=int, default=256, help="of the GPT, a multiple of 32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    arguments = parser.parse_figures()
    if "RANK" in os.environ:
        arguments.batch_size, arguments.seed, arguments.final_steps = 2, 0, None
        measure(arguments)
        return
    if arguments.quick:
        arguments.megabits, arguments.width, arguments.layers = 1000, 64, 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the hosts are taken down
    with exits_without_hosts():
        found = measured(arguments)
    speed = f"{arguments.megabits:g} Mbit/s" if arguments.megabits else "a cable without a limit"
    print(
        f"a step of a GPT, {len(RANKS)} hosts with a rank each, {speed}; syncline over {found['transport']}"
    )
    print(table(rows(found["seconds"], found["cpu_seconds"])))
    figures = figures_of(found["seconds"], arguments.megabits)
    print(goals_table(figures))
    settings = {"transport": found["transport"]}
    write_figures(
        arguments, figures, settings, machine=describe_machine(), megabits=arguments.megabits, **found
    )


if __name__ == "__main__":
    main()
