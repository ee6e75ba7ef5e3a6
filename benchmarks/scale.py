"""What grows with the number of ranks: on one host, and in the control plane alone.

    python benchmarks/scale.py [--json FILE]                  # 2, 8 and 32 ranks; 100, 1000 and 10,000 simulated
    python benchmarks/scale.py --ranks 2,8,32,128,256 [--rounds 3] [--steps 5] [--transport auto]
    python benchmarks/scale.py --simulate 100,1000,10000
    python benchmarks/scale.py --quick                        # does it run?

`--ranks` starts so many rank processes on this host. They are forked from this process, which has imported torch and
Syncline, so imports are not measured. Each runs `sl.init`, wraps a tiny model, trains, and ends. In alternating rounds,
as many processes run torch's `init_process_group("gloo")` alone.

`--simulate` runs the code by which so many ranks agree, without processes (`control_plane.py`): the rendezvous at a
store that counts requests, the search for deadlocks, the words of the riders, stragglers, hosts, and the next
generation after a loss. Its times are those of one rank.

Each table ends with the exponents of n: the slope of a least-squares line through the logarithms. Goals are judged by
medians over rounds. Those of files are for 32 ranks or more, because a process alone has about 20.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from control_plane import control_plane
from goals import goals_table
from rounds import Figure, RoundsParser, exponent, write_figures
from syncline.native import find_library
from syncline.tools.bench.results import describe_machine

Row = Mapping[str, float]

FILES, OTHERS_FILES = "files, rank 0", "files, most of others"
CPU_OF_INIT, REQUESTS = "init: CPU / Gloo's", "store requests of all"

FEW_RANKS = 32
"""The number of ranks from which on files have goals."""

LINEAR = 1.1
"""The largest exponent that counts as growth in proportion to n."""


def main() -> None:
    """Print the tables that the options ask for, and the goals."""
    arguments = parse_arguments()
    machine = describe_machine()
    print(json.dumps(machine))
    figures = []
    if arguments.ranks:
        print(
            f"\nrank processes on one host, transport={arguments.transport!r}, medians of {arguments.rounds} rounds"
        )
        import_what_ranks_use()
        rounds = {size: one_host(size, arguments) for size in arguments.ranks}
        print_table({size: medians(rows) for size, rows in rounds.items()})
        figures += figures_of_ranks(rounds)
    if arguments.simulate:
        print("\nthe control plane alone, times of one rank")
        simulated = {size: control_plane(size) for size in arguments.simulate}
        print_table(simulated)
        figures += figures_of_simulation(simulated)
    print(f"\n{goals_table(figures)}")
    write_figures(arguments, figures, {}, machine=machine)


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments. Without numbers of ranks, there are some of both kinds."""
    parser = RoundsParser(__doc__, rounds=3, quick=1)
    parser.add_argument("--ranks", type=numbers, default=[], help="numbers of rank processes on this host")
    parser.add_argument("--simulate", type=numbers, default=[], help="numbers of ranks without processes")
    parser.add_argument("--steps", type=int, default=5, help="training steps of each rank")
    parser.add_argument("--transport", default="auto", help="the argument of sl.init")
    arguments = parser.parse_figures()
    if not (arguments.ranks or arguments.simulate):
        arguments.ranks = [2, 4] if arguments.quick else [2, 8, 32]
        arguments.simulate = [10, 100] if arguments.quick else [100, 1000, 10_000]
    return arguments


def numbers(text: str) -> list[int]:
    """Parse numbers that are separated by commas."""
    return [int(part) for part in text.split(",")]


# ---------------------------------------------------------------------- tables


def print_table(rows: Mapping[int, Row]) -> None:
    """Print one line per column, because there are more columns than sizes, and the exponent of each column."""
    sizes = list(rows)
    names = list(next(iter(rows.values())))
    width = max(map(len, names))
    print(f"{'n':>{width}} " + " ".join(f"{size:>10}" for size in sizes) + "   exponent")
    for name in names:
        values = [rows[size][name] for size in sizes]
        cells = " ".join(f"{value:>10.4g}" for value in values)
        slope = exponent(dict(zip(sizes, values, strict=True)))
        print(f"{name:>{width}} {cells}   {'' if math.isnan(slope) else f'{slope:+.2f}'}")


# ---------------------------------------------------------------------- goals


def figures_of_ranks(rounds: Mapping[int, Sequence[Row]]) -> list[Figure]:
    """Return the figures that have goals, from the rounds by number of ranks."""
    found = []
    for size, rows in rounds.items():
        has_goal = size >= FEW_RANKS
        for name, most in ((FILES, 2 * size), (OTHERS_FILES, 20 + size // 8)):
            values, goal = [row[name] for row in rows], most if has_goal else None
            found.append(Figure(f"{size} ranks: {name}", values, at_most=goal, form="{:.0f}"))
        found.append(Figure(f"{size} ranks: {CPU_OF_INIT}", [row[CPU_OF_INIT] for row in rows], at_most=2.0))
    if len(rounds) > 1:
        slopes = [
            exponent({size: row[REQUESTS] for size, row in zip(rounds, rows, strict=True)})
            for rows in zip(*rounds.values(), strict=True)
        ]
        found.append(Figure(f"{REQUESTS} ranks: exponent", slopes, at_most=LINEAR))
    return found


def figures_of_simulation(rows: Mapping[int, Row]) -> list[Figure]:
    """Return the exponents of the control plane, from its figures by number of ranks."""
    slopes = {
        name: exponent({size: row[name] for size, row in rows.items()}) for name in next(iter(rows.values()))
    }
    return [
        Figure(f"control plane: {name}: exponent", [slope], at_most=LINEAR)
        for name, slope in slopes.items()
        if not math.isnan(slope)
    ]


# ---------------------------------------------------------------------- rank processes on one host


def import_what_ranks_use() -> None:
    """Import what a program imports at its first use, so that the forked processes do not.

    The collector of garbage leaves these objects alone from now on. A collection that happens to begin in a forked
    process would write to all of them, so that their pages are copied.
    """
    for name in ("init", "DistributedDataParallel", "barrier", "shutdown"):
        getattr(sl, name)
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    find_library()
    gc.freeze()


def one_host(size: int, arguments: argparse.Namespace) -> list[Row]:
    """Return the figures of each round for `size` rank processes."""
    rounds = []
    for _ in range(arguments.rounds):
        gloo = run_ranks(size, torchs_rank)
        ours = run_ranks(size, lambda: syncline_rank(arguments.transport, arguments.steps))
        rounds.append(summary(gloo, ours))
    return rounds


def medians(rows: Sequence[Row]) -> Row:
    """Return the median over the rounds of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def summary(gloo: Sequence[Row], ours: Sequence[Row]) -> Row:
    """Return the figures of one round from those of each rank."""

    def total(name: str) -> float:
        return sum(rank[name] for rank in ours)

    def longest(name: str) -> float:
        return max(rank[name] for rank in ours)

    gloo_cpu = sum(rank["init_cpu"] for rank in gloo)
    return {
        "init: wall s": longest("init_wall"),
        "init: CPU ms a rank": 1000 * total("init_cpu") / len(ours),
        CPU_OF_INIT: total("init_cpu") / gloo_cpu,
        "wrap: wall s": longest("wrap_wall"),
        "wrap: CPU ms a rank": 1000 * total("wrap_cpu") / len(ours),
        "step: wall s": longest("step_wall"),
        "step: CPU ms a rank": 1000 * total("step_cpu") / len(ours),
        "end: wall s": longest("end_wall"),
        FILES: ours[0]["files"],
        "files, rank 0, Gloo alone": gloo[0]["files"],
        OTHERS_FILES: max((rank["files"] for rank in ours[1:]), default=0.0),
        "files, most of others, Gloo alone": max((rank["files"] for rank in gloo[1:]), default=0.0),
        "sockets of all ranks": total("sockets"),
        "memory MB a rank": total("memory_mb") / len(ours),
        REQUESTS: total("requests"),
        "store requests, Gloo alone": sum(rank["requests"] for rank in gloo),
        "store kB sent to all": total("received_kb"),
    }


def torchs_rank() -> Row:
    """Join the ranks as torch does, and return the figures."""
    spent = Spent()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    figures = spent.since("init")
    requests, received_kb = store_traffic()
    dist.barrier()
    figures |= {"files": num_files(), "requests": requests, "received_kb": received_kb}
    dist.barrier()
    dist.destroy_process_group()
    return figures


def syncline_rank(transport: str, num_steps: int) -> Row:
    """Join the ranks, train, end, and return the figures."""
    spent = Spent()
    sl.init(transport)
    figures = spent.since("init")
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    ddp = sl.DistributedDataParallel(model)
    figures |= spent.since("wrap")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(num_steps + 1):
        if number == 1:  # in the first step, the ranks also agree and lay out the buckets
            spent = Spent()
        optimizer.zero_grad()
        ddp(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    steps = spent.since("step")
    figures |= {name: value / max(1, num_steps) for name, value in steps.items()}
    requests, received_kb = store_traffic()
    figures |= {"files": num_files(), "sockets": num_files("socket:"), "memory_mb": memory_mb()}
    figures |= {"requests": requests, "received_kb": received_kb}
    sl.barrier()  # so that all count before the first one ends
    spent = Spent()
    sl.shutdown()
    return figures | spent.since("end")


class Spent:
    """The time that has passed, and the CPU time of this process, since the object was created or last asked."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def since(self, name: str) -> dict[str, float]:
        """Return both times in seconds, under names that begin with `name`, and begin anew."""
        wall, cpu = time.perf_counter(), time.process_time()
        found = {f"{name}_wall": wall - self._wall, f"{name}_cpu": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu
        return found


def run_ranks(size: int, work: Callable[[], Row]) -> list[Row]:
    """Fork `size` rank processes that call `work`, and return the results in rank order."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    sys.stdout.flush()
    results, end = os.pipe()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.close(results)
            run_as_rank(rank, size, port, end, work)
        pids.append(pid)
    os.close(end)
    with open(results) as file:
        found = dict(json.loads(line) for line in file)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if len(found) < size or any(codes):
        failed = [rank for rank, code in enumerate(codes) if code]
        raise SystemExit(f"ranks {failed} of {size} failed: their errors are above")
    return [found[rank] for rank in range(size)]


def run_as_rank(rank: int, size: int, port: int, end: int, work: Callable[[], Row]) -> None:
    """Call `work` in a forked process, write its result to the pipe, and end the process."""
    code = 1
    try:
        variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        line = json.dumps([rank, work()]) + "\n"
        os.write(end, line.encode())  # at once, because other ranks write as well
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def num_files(kind: str = "") -> float:
    """Return the number of open files of this process whose names begin with `kind`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(kind)
        except FileNotFoundError:  # the listing itself
            continue
    return float(found)


def memory_mb() -> float:
    """Return the memory of this process in MB, with its part of what several processes share (PSS)."""
    with open("/proc/self/smaps_rollup") as file:
        (kilobytes,) = [int(line.split()[1]) for line in file if line.startswith("Pss:")]
    return kilobytes * 1024 / 1e6


_TCP_INFO_BYTES = 192

_BYTES_RECEIVED, _SEGMENTS_SENT = struct.Struct("=128xQ"), struct.Struct("=156xI")
"""Where the kernel's struct tcp_info has these fields."""


def store_traffic() -> tuple[float, float]:
    """Return how many requests this process has sent to the store, and how many kB it has received.

    The kernel counts the segments with data of each connection. torch sends each request at once, and a small one is
    one segment.
    """
    port = int(os.environ["MASTER_PORT"])
    requests = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getpeername()[1] != port:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # the listing itself, or a socket that is not connected
            continue
        requests += _SEGMENTS_SENT.unpack_from(info)[0]
        received += _BYTES_RECEIVED.unpack_from(info)[0]
    return float(requests), received / 1e3


if __name__ == "__main__":
    main()
