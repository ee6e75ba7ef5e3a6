"""What a compressed mean costs, by the native form of an encoding and by its form in PyTorch.

    syncline run -n 2 benchmarks/compression.py [--rounds 20] [--json FILE]
    syncline run -n 2 benchmarks/compression.py --quick      # does it run?

Each rank averages 4.2 M float32 values (four matrices), over shared memory and over Gloo, with one thread. Competitors
take turns within one tree of processes, in another order in each round. CPU time is that of the process, so it has the
work of the transport and its threads, and the waits in which a rank spins. A round's time is that of the slowest rank.
The figures are medians and quartiles over rounds. "speed-up" is the median ratio of both forms in one round, with its
bootstrapped 95 % interval. A goal is judged by the median of the CPU time of the native form, over shared memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from unittest.mock import patch

import torch

import syncline as sl
from goals import goals_table
from rounds import Figure, RoundsParser, settings_of, write_figures
from syncline.compression import Cast, Compression, MeanExchange, PowerSGD, Quantize, TopK, kernels
from syncline.session import transport_of
from syncline.tools.bench.results import ratio
from syncline.tools.bench.timing import alternate
from syncline.transport import C10dTransport, Transport
from tables import table

COMPRESSIONS: list[Compression] = [Cast(), Quantize(8), Quantize(4), Quantize(2), TopK(), PowerSGD(2)]
NATIVE, TORCH = "native", "PyTorch"
GOALS_MILLISECONDS = {"Cast": 10.0, "Quantize": 15.0, "TopK": 25.0}

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each round, by competitor."""


class Meter:
    """The CPU time and the wall time of averages by one compression and one form."""

    def __init__(self, compression: Compression, form: str, transport: Transport, *, num_values: int) -> None:
        shapes = [(num_values // 4096, 1024)] * 4
        device = torch.device("cpu")
        self._exchange = MeanExchange(
            compression, shapes, dtype=torch.float32, device=device, transport=transport
        )
        self._values = torch.randn(num_values, generator=torch.Generator().manual_seed(transport.rank))
        self._flat = torch.empty_like(self._values)
        self._form, self._transport = form, transport
        self.wall_seconds: list[float] = []

    def cpu_seconds(self, num_calls: int) -> float:
        """Average, and return the CPU time of this process. The wall time is added to `wall_seconds`."""
        cpu_seconds = wall_seconds = 0.0
        for _ in range(num_calls):
            self._flat.copy_(self._values)
            self._transport.barrier().wait()
            cpu_began, wall_began = time.process_time(), time.perf_counter()
            self._average()
            cpu_seconds += time.process_time() - cpu_began
            wall_seconds += time.perf_counter() - wall_began
        self.wall_seconds.append(wall_seconds / num_calls)
        return cpu_seconds

    def _average(self) -> None:
        if self._form == NATIVE:
            self._exchange.start(self._flat)
            self._exchange.wait()
        else:
            with patch.object(kernels, "library_if_any", lambda: None):
                self._exchange.start(self._flat)
                self._exchange.wait()


def measure(transport: Transport, *, num_rounds: int, num_values: int) -> tuple[Rounds, Rounds]:
    """Return the CPU time and the wall time of each average, by compression and form."""
    meters = {
        f"{compression}, {form}": Meter(compression, form, transport, num_values=num_values)
        for compression in COMPRESSIONS
        for form in (NATIVE, TORCH)
    }
    timers: dict[str, Callable[[int], float]] = {name: meter.cpu_seconds for name, meter in meters.items()}
    cpu = alternate(timers, num_rounds=num_rounds, num_calls=dict.fromkeys(timers, 1), transport=transport)
    return cpu, {name: meter.wall_seconds[2:] for name, meter in meters.items()}  # two rounds warm up


def rows(cpu: Rounds, wall: Rounds) -> list[list[str]]:
    """Return a row for each compression: milliseconds of both forms, and how they compare."""
    found = [
        [
            "compression",
            "CPU ms, native",
            "CPU ms, PyTorch",
            "speed-up",
            "wall ms, native",
            "wall ms, PyTorch",
        ]
    ]
    for compression in COMPRESSIONS:
        native, torchs = f"{compression}, {NATIVE}", f"{compression}, {TORCH}"
        middle, low, high = ratio(cpu[torchs], cpu[native])
        speed_up = f"{middle:.1f}x [{low:.1f}, {high:.1f}]"
        shown = [quartiles(seconds) for seconds in (cpu[native], cpu[torchs], wall[native], wall[torchs])]
        found.append([str(compression), shown[0], shown[1], speed_up, shown[2], shown[3]])
    return found


def quartiles(seconds: Sequence[float]) -> str:
    """Format the median and the quartiles of times in milliseconds."""
    low, middle, high = statistics.quantiles([1e3 * one for one in seconds], n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def figures_of(cpu: Rounds) -> list[Figure]:
    """Return the CPU milliseconds of each compression, with the goals."""
    return [
        Figure(
            f"mean of 4.2 M values, {compression}: CPU ms",
            [1e3 * one for one in cpu[f"{compression}, {NATIVE}"]],
            at_most=GOALS_MILLISECONDS.get(type(compression).__name__),
            form="{:.1f}",
        )
        for compression in COMPRESSIONS
    ]


def main() -> None:
    arguments = RoundsParser(__doc__, rounds=20, quick=2).parse_figures()
    world = sl.init(transport="shm", device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/compression.py")
    torch.set_num_threads(1)
    num_values = 1 << (16 if arguments.quick else 22)
    gloo = C10dTransport()
    found: dict[str, dict[str, Rounds]] = {}
    for transport in (transport_of(None), gloo):
        cpu, wall = measure(transport, num_rounds=arguments.rounds, num_values=num_values)
        found[transport.name] = {"cpu_seconds": cpu, "wall_seconds": wall}
        if world.rank == 0:
            print(f"the mean of {num_values:,} values, {world.size} ranks, {transport.name}")
            print(table(rows(cpu, wall)), end="\n\n", flush=True)
    if world.rank == 0:
        figures = figures_of(next(iter(found.values()))["cpu_seconds"])
        print(goals_table(figures))
        write_figures(arguments, figures, settings_of(world), **found)
    gloo.close()  # a Gloo group that lives on may abort the process while Python ends
    sl.shutdown()


if __name__ == "__main__":
    main()
