"""`syncline bench`: measure Syncline on this machine, and print tables.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from syncline.tools.bench.machine import total_memory_bytes
from syncline.tools.bench.results import SUFFIXES, can_plot, parse_size, plot, report
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.values import MOST_RANKS, check_number, check_output, write_file
from syncline.tools.plan import usual_path
from syncline.words import format_bytes

_HELP = """\
usage: syncline bench [-n RANKS] [options]

Measure what you choose by on this machine: the time of all_reduce by size, and the
time of a training step with each mode of Syncline. They take turns in the same
processes, so that other load on the machine affects all of them. This takes about a
minute. Keep the machine idle meanwhile.

  syncline bench                              2 ranks, everything
  syncline bench -n 4 --sizes 1K,1M,25M --no-steps
  syncline bench --json bench.json --plot bench.png
  syncline bench --calibrate                  measure what syncline plan needs

  -n RANKS              number of processes, from 2 (default: 2); each has 1 thread
  --sizes SIZE[,SIZE]   payloads of all_reduce; 1K is 1024 bytes
                        (default: 1K,16K,64K,256K,1M,4M,25M,100M)
  --steps, --no-steps   measure training steps, or not (default: measure them)
  --rounds N            number of turns (default: 20)
  --quick               3 short rounds of few sizes and the small model, to check
                        that the benchmark runs; the times are not reliable
  --calibrate           measure only what synchronization costs with 2, 4 and 8 ranks,
                        for syncline plan and syncline report, and keep it for this
                        user (with --json FILE: write it to FILE instead)
  --json FILE           write the times of each round to FILE
  --plot FILE           draw the results in FILE, a .png or .svg; this needs
                        matplotlib: pip install 'syncline[bench]'
  -h, --help            show this text

The page "Benchmarks" of the documentation describes the measurement. Ctrl-C ends it
without a result.
"""

_NAME = "syncline bench"

_SIZES = "1K,16K,64K,256K,1M,4M,25M,100M"

_QUICK_SIZES = "1K,64K,1M"

_COPIES = 4
"""The largest number of tensors of one size that a rank keeps in memory at once, approximately."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline bench` with these arguments.

    Returns:
        The exit code. 0 means that the measurement is complete. After a failure, it is the exit code of the rank that
        failed first. If a signal ended the measurement, the result is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid. Nothing was measured.
    """
    args = _parse(argv)
    path = usual_path() if args.calibrate and args.json is None else args.json
    if args.calibrate:
        with contextlib.suppress(OSError):  # the check names what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
        check_output("--calibrate", path)
    else:
        plan = {
            "sizes": _sizes(args),
            "models": () if args.steps is False else ("0.3M",) if args.quick else ("0.3M", "5M"),
            "num_rounds": args.rounds or (3 if args.quick else 20),
            "turn_seconds": 0.002 if args.quick else 0.01,
        }
        say(_NAME, f"starting {args.n} ranks")
    from syncline.tools.bench.measured import MeasurementFailed, calibrated, measured

    try:
        if args.calibrate:
            machine = calibrated(lambda text: say(_NAME, text))
            write_file("--json", path, json.dumps(machine.to_json(), indent=1) + "\n")
            print(f"The figures of {machine.name} are in {path}")
            return 0
        found = measured(args.n, "ranks", json.dumps(plan), prefix=f"{_NAME}: ")
    except MeasurementFailed as failed:
        return failed.code
    print(report(found))
    if args.quick:
        print("\n--quick: these results only show that the benchmark runs, not how fast it is")
    if path is not None:
        write_file("--json", path, json.dumps(found, indent=2) + "\n")
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(_NAME, _HELP)
    parser.add_argument("-n", type=int)
    parser.add_argument("--sizes", action="append")
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", default=None)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_all(argv)
    if args.calibrate:
        _refuse_without_effect(args)
    args.n = 2 if args.n is None else args.n
    if args.n < 2:
        raise UsageError(
            f"-n {args.n}: expected at least 2 ranks, because one rank has no peer to synchronize with"
        )
    check_number("-n", args.n, 2, MOST_RANKS, "ranks")
    check_number("--rounds", args.rounds, 2, 100_000, "rounds")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_output(option, path)
    if args.plot is not None:
        if args.plot == args.json:
            raise UsageError(f"--plot {args.plot}: expected a file of its own, got that of --json")
        if args.plot.suffix.lower() not in SUFFIXES:
            raise UsageError(f"--plot {args.plot}: expected a file name that ends in {' or '.join(SUFFIXES)}")
        if not can_plot():
            raise UsageError(
                "--plot needs matplotlib, which is not installed: pip install 'syncline[bench]', or leave --plot out"
            )
    return args


def _refuse_without_effect(args: argparse.Namespace) -> None:
    """Raise an error if an option was given that has no effect with --calibrate.

    Raises:
        UsageError: there is such an option.
    """
    steps = "--no-steps" if args.steps is False else "--steps"
    options = {"-n": args.n, "--sizes": args.sizes, steps: args.steps, "--rounds": args.rounds}
    options |= {"--quick": args.quick, "--plot": args.plot}
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"--calibrate and {', '.join(given)} exclude each other: --calibrate always makes the same measurement, "
            "and only --json applies to it"
        )


def _sizes(args: argparse.Namespace) -> list[str]:
    """Return the sizes to measure, in increasing order.

    Raises:
        UsageError: a size is invalid, or the largest size needs more memory than this host has.
    """
    texts = args.sizes or [_QUICK_SIZES if args.quick else _SIZES]
    try:
        sizes = sorted(re.split(r"[,\s]+", ",".join(texts).strip(", ")), key=parse_size)
    except ValueError as error:
        raise UsageError(f"--sizes: {error}") from None
    needed, there = args.n * parse_size(sizes[-1]) * _COPIES, total_memory_bytes()
    if needed > there:
        raise UsageError(
            f"--sizes {sizes[-1]}: {args.n} ranks would need about {format_bytes(needed)} of memory, but this host has "
            f"{format_bytes(there)}: choose smaller sizes"
        )
    return sizes
