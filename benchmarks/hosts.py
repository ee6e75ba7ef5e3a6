"""What is a hierarchy worth? all_reduce over two hosts, against Gloo among all ranks alike.

    python benchmarks/hosts.py [--ranks aabb] [--megabits 100 1000] [--sizes 1KiB 1MiB 25MiB] [--rounds 15]

The hosts are network namespaces of this machine, joined by a cable of the given speeds (root, Linux). Both ways run in
the same processes and take turns; a round's time is the slowest rank's, a ratio the median over rounds with its 95 %
confidence interval. Each all_reduce is checked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

import torch

import syncline as sl
from syncline.bench.rounds import ratio, take_turns
from syncline.testing.hosts import HostsUnavailable, two_hosts
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.world import transport_of

UNITS = {"KiB": 2**10, "MiB": 2**20}
FLAT, HIERARCHY = "gloo among all ranks", "hierarchy"


def num_bytes_of(size: str) -> int:
    """ "25MiB" in bytes."""
    return int(float(size[:-3]) * UNITS[size[-3:]])


def measure(sizes: list[str], num_rounds: int) -> None:
    """As one of the ranks."""
    torch.set_num_threads(1)
    world = sl.init()
    flat, best = C10dTransport(), transport_of(None)
    for size in sizes:
        tensor = torch.ones(num_bytes_of(size) // 4)

        def all_reduce(transport: Transport, tensor: torch.Tensor = tensor) -> None:
            tensor.fill_(1.0)
            transport.all_reduce(tensor, "sum").wait()
            assert tensor[-1].item() == world.size

        steps = {FLAT: lambda: all_reduce(flat), HIERARCHY: lambda: all_reduce(best)}
        seconds = take_turns(steps, num_rounds=num_rounds, num_steps=1, world=world)
        if world.rank == 0:
            medians = [statistics.median(seconds[name]) * 1e3 for name in (FLAT, HIERARCHY)]
            middle, low, high = ratio(seconds[FLAT], seconds[HIERARCHY])
            print(
                f"{size:>8} {medians[0]:12.2f} ms {medians[1]:12.2f} ms   {middle:6.2f} [{low:.2f}, {high:.2f}]"
            )
    sl.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="aabb", help="which rank lives on which host")
    parser.add_argument("--megabits", type=float, nargs="+", default=[100, 1000], help="speeds of the cable")
    parser.add_argument("--sizes", nargs="+", default=["1KiB", "64KiB", "1MiB", "25MiB"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return measure(arguments.sizes, arguments.rounds)
    try:
        for rate in arguments.megabits:
            with two_hosts(megabits_per_second=rate) as hosts:
                command = ["--sizes", *arguments.sizes, "--rounds", str(arguments.rounds)]
                hosts.start([sys.executable, __file__, *command], arguments.ranks)
                outputs = hosts.outputs(timeout_seconds=600)
            for rank, (code, _, err) in enumerate(outputs):
                if code:
                    sys.exit(f"rank {rank} ended with {code}:\n{err}")
            print(f"\n{len(arguments.ranks)} ranks ({arguments.ranks}), {rate:g} Mbit/s")
            print(f"{'size':>8} {FLAT:>15} {HIERARCHY:>15}   times as fast")
            print("\n".join(line for line in outputs[0][1].splitlines() if "iB" in line))
    except HostsUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
