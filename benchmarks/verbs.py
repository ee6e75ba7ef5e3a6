"""What sl.average_ costs, against one flat all_reduce of the same bytes and against a loop over parameters.

    syncline run -n 2 benchmarks/verbs.py [--rounds 40] [--json FILE]
    syncline run -n 2 benchmarks/verbs.py --quick      # does it run?

Two modules: a GPT of 19 M parameters, and a chain of 500 small ones. Competitors take turns within one tree of
processes, in another order in each round; a round's time is the slowest rank's. A ratio is the median over rounds of
the two times of one round; its 95 % confidence interval is bootstrapped over rounds.

"one flat all_reduce" reduces a contiguous tensor of the same values, by "mean", over the same transport. "a loop
of dist.all_reduce" is what one writes by hand: one call and one division a parameter, over Gloo. "weighted" has another
weight on each rank. check_replicas and sync_gradients_ are there for orientation.

ddp.sync_parameters_ is called when all parameters are equal, and when one value differs. A hash of a few values of each
rank finds nearly every difference ("sample"); if it finds none, all values are hashed and compared ("all values"). Both
are measured without the call, too: this is what a call costs in vain if parameters differ.

A goal is judged by the median; "within noise" says that the interval holds both answers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from goals import goals_table
from models import GPT, SIZES, Chain
from rounds import Figure, RoundsParser, settings_of, write_figures
from syncline.equality import hash_of, hash_of_sample
from syncline.session import transport_of
from syncline.tools.bench.results import quotients, ratio
from syncline.tools.bench.timing import alternate, calls_for, timer
from syncline.transport import C10dTransport, Transport
from syncline.transport.agreement import exchange
from tables import table

FLAT, LOOP, AVERAGE = "one flat all_reduce", "a loop of dist.all_reduce", "sl.average_"
WEIGHTED, GRADIENTS, CHECK = "sl.average_, weighted", "sl.sync_gradients_", "sl.check_replicas"
EQUAL, DIFFERENT = "ddp.sync_parameters_, equal", "ddp.sync_parameters_, one value differs"
SAMPLE, ALL_VALUES = "comparison of a sample", "comparison of all values"

TIMES_FLAT = 1.2
"""What average_ of the large module may take, in times of the flat all_reduce."""
TIMES_LOOP = 5.0
"""How many times as fast as the loop it has to be on the small parameters."""
TIMES_AVERAGE = 0.1
"""What a comparison may take that finds a difference, in times of average_."""

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each round, by competitor."""


def competitors(module: nn.Module, transport: Transport) -> dict[str, Callable[[], object]]:
    """What is called, by name; the loop over Gloo alone."""
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    # The same values, for some processors write zeros over zeros faster than anything else.
    flat = torch.cat([parameter.detach().view(-1) for parameter in parameters])

    def loop() -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data.div_(transport.size)

    replica = copy.deepcopy(module)
    ddp = sl.DistributedDataParallel(replica, process_group=transport, strategy=sl.Manual())
    tensors = list(replica.parameters())
    middle = tensors[0].data.view(-1)[tensors[0].numel() // 2 :]

    def sync_different() -> None:
        middle[0] = float(transport.rank)  # within the sample
        ddp.sync_parameters_()

    calls: dict[str, Callable[[], object]] = {
        FLAT: lambda: transport.all_reduce(flat, "mean").wait(),
        AVERAGE: lambda: sl.average_(module, group=transport),
        WEIGHTED: lambda: sl.average_(module, 1.0 + transport.rank, group=transport),
        GRADIENTS: lambda: sl.sync_gradients_(module, group=transport),
        CHECK: lambda: sl.check_replicas(module, group=transport),
        EQUAL: ddp.sync_parameters_,
        DIFFERENT: sync_different,
        SAMPLE: lambda: hash_of_sample(tensors),
        ALL_VALUES: lambda: exchange(transport, "hash", [], payload=hash_of(tensors)),
    }
    return calls | {LOOP: loop} if transport.name == "gloo" else calls


def measure(module: nn.Module, transport: Transport, *, num_rounds: int, turn_seconds: float) -> Rounds:
    """Seconds a call, by competitor and round."""
    timers = {name: timer(call, transport) for name, call in competitors(module, transport).items()}
    num_calls = calls_for(timers, seconds=turn_seconds, most=50, transport=transport)
    return alternate(timers, num_rounds=num_rounds, num_calls=num_calls, transport=transport)


def rows(rounds: Rounds) -> list[list[str]]:
    """A row for each competitor: milliseconds, and its ratio to the flat all_reduce."""
    found = [["what", "ms", "in times of the flat one"]]
    for name, seconds in rounds.items():
        middle, low, high = ratio(seconds, rounds[FLAT])
        milliseconds = f"{statistics.median(seconds) * 1e3:.2f}"
        found.append([name, milliseconds, f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    return found


def figures_of(large: Mapping[str, Rounds], small: Rounds) -> list[Figure]:
    """What was promised of average_, and what a comparison may cost that finds a difference."""
    found = [
        Figure(
            f"19 M parameters, {name}: {AVERAGE} / {FLAT}",
            quotients(rounds[AVERAGE], rounds[FLAT]),
            at_most=TIMES_FLAT,
        )
        for name, rounds in large.items()
    ]
    found += [
        Figure(
            f"19 M parameters, gloo: {comparison} / {AVERAGE}",
            quotients(large["gloo"][comparison], large["gloo"][AVERAGE]),
            at_most=TIMES_AVERAGE,
            form="{:.3f}",
        )
        for comparison in (SAMPLE, ALL_VALUES)
    ]
    times = quotients(small[LOOP], small[AVERAGE])
    return [*found, Figure(f"500 parameters, gloo: {LOOP} / {AVERAGE}", times, at_least=TIMES_LOOP)]


def parse_arguments() -> argparse.Namespace:
    return RoundsParser(__doc__, rounds=40, quick=3).parse_figures()


def main() -> None:
    arguments = parse_arguments()
    world = sl.init(device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/verbs.py")
    torch.set_num_threads(1)
    engines: list[Transport] = [transport_of(None)]
    if engines[0].name != "gloo":
        engines.append(C10dTransport())
    modules: dict[str, Callable[[], nn.Module]] = {
        "a GPT of 19 M parameters": lambda: GPT(SIZES["0.3M" if arguments.quick else "19M"]),
        "500 small parameters": lambda: Chain(num_parameters=500),
    }
    found: dict[str, dict[str, Any]] = {}
    for title, make in modules.items():
        found[title] = {}
        for transport in engines:
            rounds = measure(
                make(),
                transport,
                num_rounds=arguments.rounds,
                turn_seconds=0.002 if arguments.quick else 0.1,
            )
            found[title][transport.name] = rounds
            if world.rank == 0:
                print(f"{title}, {world.size} ranks, {transport.name}")
                print(table(rows(rounds)), end="\n\n", flush=True)
    if world.rank == 0:
        large, small = found.values()
        figures = figures_of(large, small["gloo"])
        print(goals_table(figures))
        write_figures(arguments, figures, settings_of(world), modules=found)
    for engine in engines[1:]:
        engine.close()  # a Gloo group that lives on may abort the process while Python ends
    sl.shutdown()


if __name__ == "__main__":
    main()
