"""What is a hierarchy worth? all_reduce over several hosts, against Gloo among all ranks alike, and against the wire.

    python benchmarks/hosts.py [--ranks aabb] [--megabits 100 1000] [--sizes 1KiB 1MiB 25MiB] [--rounds 15]
    python benchmarks/hosts.py --ranks aaaabbbbccccdddd --megabits 100 --sizes 25MiB      # four hosts with four ranks

The hosts are network namespaces of this machine, joined by cables of the given speeds (root, Linux). All ways run in
the same processes and take turns; a round's time is the slowest rank's, a ratio the median over rounds with its 95 %
confidence interval. Each all_reduce is checked. "in place" is a tensor in shared memory, as gradients are. "the wire"
is the time in which a cable carries the bytes that a ring among the hosts sends and receives on it: 2 (n - 1) / n times
the tensor, for n hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial
from typing import Any

import torch

import syncline as sl
from goals import goals_table
from rounds import Figure, RoundsParser, take_turns, write_figures
from syncline.session import transport_of
from syncline.testing import HostsUnavailable, simulated_hosts
from syncline.tools.bench.results import median_interval, quotients, ratio
from syncline.transport import C10dTransport, Transport

UNITS = {"KiB": 2**10, "MiB": 2**20}
FLAT, HIERARCHY, IN_PLACE = "gloo among all ranks", "hierarchy", "in place"


def num_bytes_of(size: str) -> int:
    """ "25MiB" in bytes."""
    return int(float(size[:-3]) * UNITS[size[-3:]])


def measure(sizes: list[str], num_rounds: int) -> None:
    """As one of the ranks; rank 0 prints a line of JSON for each size."""
    torch.set_num_threads(1)
    world = sl.init()
    flat, best = C10dTransport(), transport_of(None)
    for size in sizes:
        numel = num_bytes_of(size) // 4
        tensor, placed = torch.empty(numel), best.allocate(numel, torch.float32, torch.device("cpu"))

        def all_reduce(transport: Transport, tensor: torch.Tensor) -> None:
            tensor.fill_(1.0)
            transport.all_reduce(tensor, "sum").wait()
            assert tensor[-1].item() == world.size

        steps = {
            FLAT: partial(all_reduce, flat, tensor),
            HIERARCHY: partial(all_reduce, best, tensor),
            IN_PLACE: partial(all_reduce, best, placed),
        }
        seconds = take_turns(steps, num_rounds=num_rounds, num_steps=1, world=world)
        if world.rank == 0:
            print(json.dumps({"size": size, "seconds": seconds}))
    sl.shutdown()


def measured(rate: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 has printed, with a cable of that speed."""
    with simulated_hosts(len(set(arguments.ranks)), megabits_per_second=rate) as hosts:
        command = ["--sizes", *arguments.sizes, "--rounds", str(arguments.rounds)]
        hosts.start([sys.executable, __file__, *command], arguments.ranks)
        outputs = hosts.outputs(timeout_seconds=900)
    for rank, (code, _, err) in enumerate(outputs):
        if code:
            sys.exit(f"rank {rank} ended with {code}:\n{err}")
    return [json.loads(line) for line in outputs[0][1].splitlines() if line.startswith("{")]


def times_the_wire(rate: float, ranks: str, row: dict[str, Any], way: str) -> list[float]:
    """The times of one way, divided by the time that a ring among the hosts needs the cable for."""
    num_hosts = len(set(ranks))
    wire_seconds = 2 * (num_hosts - 1) / num_hosts * num_bytes_of(row["size"]) * 8 / (rate * 1e6)
    return [seconds / wire_seconds for seconds in row["seconds"][way]]


def figures_of(rate: float, ranks: str, rows: list[dict[str, Any]]) -> list[Figure]:
    """What is compared between two measurements. A tensor of 10 MiB or more has a goal."""
    where = f"on {len(set(ranks))} hosts with {len(ranks)} ranks, {rate:g} Mbit/s"
    found = []
    for row in rows:
        what = f"all_reduce of {row['size']} {where}"
        values = quotients(row["seconds"][HIERARCHY], row["seconds"][FLAT])
        found.append(Figure(f"{what}: hierarchy / Gloo", values))
        if num_bytes_of(row["size"]) >= 10 * 2**20:
            for way in (HIERARCHY, IN_PLACE):
                values = times_the_wire(rate, ranks, row, way)
                found.append(Figure(f"{what}: {way} / the wire", values, at_most=1.15))
    return found


def show(rate: float, ranks: str, rows: list[dict[str, Any]]) -> None:
    """One table."""
    print(f"\n{len(ranks)} ranks ({ranks}), {rate:g} Mbit/s")
    print(
        f"{'all_reduce':>10} {FLAT:>22} {HIERARCHY:>15}   times as fast         times the wire      ... in place"
    )
    for row in rows:
        seconds = row["seconds"]
        of_wire, in_place = (
            "{:.2f} [{:.2f}, {:.2f}]".format(*median_interval(times_the_wire(rate, ranks, row, way)))
            for way in (HIERARCHY, IN_PLACE)
        )
        flat, best = (statistics.median(seconds[name]) * 1e3 for name in (FLAT, HIERARCHY))
        middle, low, high = ratio(seconds[FLAT], seconds[HIERARCHY])
        print(
            f"{row['size']:>10} {flat:>19.2f} ms {best:>12.2f} ms   "
            f"{middle:.2f} [{low:.2f}, {high:.2f}]   {of_wire}   {in_place}"
        )


def main() -> None:
    parser = RoundsParser(__doc__, rounds=15, quick=2)
    parser.add_argument("--ranks", default="aabb", help="which rank lives on which host")
    parser.add_argument("--megabits", type=float, nargs="+", default=[100, 1000], help="speeds of the cable")
    parser.add_argument("--sizes", nargs="+", default=["1KiB", "64KiB", "1MiB", "25MiB"])
    arguments = parser.parse_figures()
    if "RANK" in os.environ:
        measure(arguments.sizes, arguments.rounds)
        return
    if arguments.quick:
        arguments.megabits, arguments.sizes = [1000], ["1KiB", "64KiB"]
    results: dict[float, Any] = {}
    figures: list[Figure] = []
    try:
        for rate in arguments.megabits:
            results[rate] = measured(rate, arguments)
            show(rate, arguments.ranks, results[rate])
            figures += figures_of(rate, arguments.ranks, results[rate])
    except HostsUnavailable as error:
        sys.exit(str(error))
    print(f"\n{goals_table(figures)}")
    write_figures(arguments, figures, {}, ranks=arguments.ranks, megabits=results)


if __name__ == "__main__":
    main()
