"""`syncline bench`: measure Syncline against Gloo and MPI on this machine, and print tables.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from syncline import environment
from syncline.tools.bench.machine import total_memory_bytes
from syncline.tools.bench.plot import SUFFIXES, can_plot, plot
from syncline.tools.bench.tables import parse_size, report, size_text
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.launch.command import worker_command
from syncline.tools.launch.guardian import Guardian
from syncline.tools.plan import usual_path

if TYPE_CHECKING:
    from syncline.tools.bench.goals import Figure
    from syncline.tools.bench.ranks import Plan


_HELP = """\
usage: syncline bench [-n RANKS] [options]

Measure all_reduce by size and a training step on this machine: Syncline against
Gloo, and against MPI if mpi4py is installed. The engines take turns in the same
processes, so that other load on the machine affects all of them. This takes about
two minutes. Keep the machine idle meanwhile.

  syncline bench                              2 ranks, everything
  syncline bench -n 4 --sizes 1K,1M,25M --no-steps
  syncline bench --json before.json --plot bench.png
  syncline bench --compare before.json        what has changed since then
  syncline bench --calibrate                  measure what syncline plan needs

  -n RANKS              number of processes, from 2 (default: 2); each has 1 thread
  --sizes SIZE[,SIZE]   payloads of all_reduce; 1K is 1024 bytes
                        (default: 1K,16K,64K,256K,1M,4M,25M,100M)
  --steps, --no-steps   measure training steps, or not (default: measure them)
  --rounds N            number of turns of each engine (default: 20)
  --quick               3 short rounds of few sizes and the small model, to check
                        that the benchmark runs; the times are not reliable
  --calibrate           measure only what synchronization costs with 2, 4 and 8 ranks,
                        for syncline plan and syncline report, and keep it for this
                        user (with --json FILE: write it to FILE instead)
  --json FILE           write the results, with the times of each round, to FILE
  --compare FILE        compare with the results of --json FILE from before; the exit
                        status is 1 if a figure is worse by more than noise
  --plot FILE           draw the results in FILE, a .png or .svg; this needs
                        matplotlib: pip install 'syncline[bench]'
  -h, --help            show this text

The page "Benchmarks" of the documentation describes the measurement. Ctrl-C ends it
without a result.
"""

_SIZES = "1K,16K,64K,256K,1M,4M,25M,100M"

_QUICK_SIZES = "1K,64K,1M"

_COPIES = 8
"""The largest number of tensors of one size that a rank and its engines keep in memory at once, approximately."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline bench` with these arguments.

    Returns:
        The exit code. 0 means that the measurement is complete. 1 means that a figure is worse than in the results of
        --compare. After a failure, the result is the exit code of the
        rank that failed first. If a signal ended the measurement, the result is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid. No rank was started.
    """
    args = _parse(argv)
    before = None if args.compare is None else _figures_in(args.compare)
    if args.calibrate:
        return _calibrate(args.json)
    sizes = _sizes(args)
    print(f"syncline bench: starting {args.n} ranks", file=sys.stderr, flush=True)
    plan = _plan(args, sizes)
    from syncline.tools.bench.goals import figures_of, goals_table, show_comparison, to_json
    from syncline.tools.bench.timing import summarize
    from syncline.tools.launch.supervise import run_on_this_host

    with Guardian(environment.for_child({})) as guardian:
        output = guardian.folder / "measured.json"
        program = ["syncline.tools.bench.ranks", json.dumps(asdict(plan)), str(output)]
        command = worker_command(program, is_module=True)
        code = run_on_this_host(args.n, command, guardian, num_threads=1, prefix="syncline bench: ")
        if code:
            return code
        summary = summarize(json.loads(output.read_text()))
    print(report(summary))
    figures = figures_of(summary)
    if goals := goals_table(figures):
        print(f"\nGoals\n{goals}")
    if args.quick:
        print("\n--quick: these results only show that the benchmark runs, not how fast the engines are")
    if args.json is not None:
        args.json.write_text(json.dumps({**summary, "figures": to_json(figures)}, indent=2) + "\n")
    if args.plot is not None:
        plot(summary, args.plot)
    return 0 if before is None else show_comparison(args.compare, before, figures)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline bench", _HELP)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--sizes", action="append")
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_all(argv)
    if args.n < 2:
        raise UsageError(
            f"-n {args.n}: expected at least 2 ranks, because one rank has no peer to synchronize with"
        )
    if args.compare is not None and args.quick:
        raise UsageError("--compare and --quick exclude each other: the times of --quick are not reliable")
    if args.rounds is not None and args.rounds < 2:
        raise UsageError(f"--rounds {args.rounds}: expected at least 2 rounds")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and path.is_dir():
            raise UsageError(f"{option} {path}: expected a file, got a folder")
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: expected the path of a file in a folder that exists")
        if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UsageError(f"{option} {path}: expected a file that this user may write")
    if args.plot is not None and args.plot.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {args.plot}: expected a file name that ends in {' or '.join(SUFFIXES)}")
    if args.plot is not None and not can_plot():
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'syncline[bench]', or leave --plot out"
        )
    return args


def _figures_in(path: Path) -> list[Figure]:
    """Return the figures in the results of an earlier measurement.

    Raises:
        UsageError: the file cannot be read, or has no figures.
    """
    from syncline.tools.bench.goals import from_json

    try:
        found = from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(f"--compare {path}: {error}") from None
    if not found:
        raise UsageError(f"--compare {path}: expected a file that syncline bench --json has written")
    return found


def _calibrate(path: Path | None) -> int:
    """Measure this machine, and write its figures to a file. Return the exit code."""
    from syncline.tools.bench.measured import MeasurementFailed, calibrated

    try:
        machine = calibrated(lambda text: print(f"syncline bench: {text}", file=sys.stderr, flush=True))
    except MeasurementFailed as failed:
        return failed.code
    target = usual_path() if path is None else path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(machine.to_json(), indent=1) + "\n")
    print(f"The figures of {machine.name} are in {target}")
    return 0


def _sizes(args: argparse.Namespace) -> list[int]:
    """Return the sizes to measure, in bytes, in increasing order.

    Raises:
        UsageError: a size is invalid, or the largest size needs more memory than this host has.
    """
    texts = args.sizes or [_QUICK_SIZES if args.quick else _SIZES]
    try:
        sizes = sorted({parse_size(text) for text in re.split(r"[,\s]+", ",".join(texts).strip(", "))})
    except ValueError as error:
        raise UsageError(f"--sizes: {error}") from None
    needed, there = args.n * sizes[-1] * _COPIES, total_memory_bytes()
    if needed > there:
        raise UsageError(
            f"--sizes {size_text(sizes[-1])}: {args.n} ranks would need about {size_text(needed)} of memory, but this "
            f"host has {size_text(there)}: choose smaller sizes"
        )
    return sizes


def _plan(args: argparse.Namespace, sizes: list[int]) -> Plan:
    """Return the plan of the measurement that the options request."""
    from syncline.tools.bench.ranks import Plan

    models = ("0.3M",) if args.quick else ("0.3M", "5M")
    return Plan(
        sizes_bytes=sizes,
        num_rounds=args.rounds or (3 if args.quick else 20),
        num_step_rounds=args.rounds or (2 if args.quick else 20),
        num_steps=1 if args.quick else 2,
        turn_seconds=0.002 if args.quick else 0.01,
        models=models if args.steps else (),
        mpis=_mpis(),
    )


def _mpis() -> list[dict[str, str]]:
    if importlib.util.find_spec("mpi4py") is None:
        return []
    from syncline.tools.bench.mpi import find_mpi

    try:
        return [asdict(find_mpi(sys.executable))]
    except ValueError as error:
        print(f"syncline bench: MPI is not measured: {error}", file=sys.stderr)
        return []
