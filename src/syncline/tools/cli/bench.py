"""`syncline bench`: measure Syncline on this machine, and print tables.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from syncline.tools.bench.results import SUFFIXES, can_plot, parse_size, plot, report, total_memory_bytes
from syncline.tools.cli.options import CommandParser, refuse
from syncline.tools.cli.output import say, write_file
from syncline.tools.cli.values import checked, integer, output_file
from syncline.tools.plan.machine import usual_path
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

_SIZES = ("1K", "16K", "64K", "256K", "1M", "4M", "25M", "100M")

_QUICK_SIZES = ("1K", "64K", "1M")

_COPIES = 4
"""The largest number of tensors of one size that a rank keeps in memory at once, approximately."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline bench` with these arguments.

    Returns:
        The exit code, 0: the measurement is complete.

    Raises:
        UsageError: the arguments are invalid. Nothing was measured.
        SystemExit: a rank has failed. The code is that of the rank that failed first. If a signal ended the
            measurement, it is 128 + the number of the signal.
    """
    args = _parse(argv)
    if args.calibrate and args.json is None:
        usual_path().parent.mkdir(parents=True, exist_ok=True)
        args = _parse([*argv, "--json", str(usual_path())])
    if not args.calibrate:
        plan = {
            "sizes": _sizes(args),
            "models": () if args.steps is False else ("0.3M",) if args.quick else ("0.3M", "5M"),
            "num_rounds": args.rounds or (3 if args.quick else 20),
            "turn_seconds": 0.002 if args.quick else 0.01,
        }
        say(_NAME, f"starting {args.n} ranks")
    from syncline.tools.bench.measured import calibrated, measured

    if args.calibrate:
        machine = calibrated(lambda text: say(_NAME, text))
        write_file(args.json, json.dumps(machine.to_json(), indent=1) + "\n", option="--json")
        print(f"The figures of {machine.name} are in {args.json}")
        return 0
    found = measured(args.n, "ranks", json.dumps(plan), prefix=f"{_NAME}: ")
    print(report(found))
    if args.quick:
        print("\n--quick: these results only show that the benchmark runs, not how fast it is")
    if args.json is not None:
        write_file(args.json, json.dumps(found, indent=2) + "\n", option="--json")
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(_NAME, _HELP)
    parser.add_argument("-n", type=integer("a number of ranks", 2, 1024), default=2)
    parser.add_argument("--sizes", action="extend", type=_SPLIT)
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction)
    parser.add_argument("--rounds", type=integer("a number of rounds", 2, 100_000))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=output_file)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_all(argv)
    given = [word.partition("=")[0] for word in argv if word.startswith("-")]
    others = ", ".join(word for word in given if word not in ("--calibrate", "--json"))
    is_fixed = args.calibrate and others
    refuse(is_fixed, f"--calibrate and {others} exclude each other: only --json applies to it")
    if args.plot is not None:
        refuse(args.plot == args.json, f"--plot {args.plot}: expected a file of its own, got that of --json")
        is_picture = args.plot.suffix.lower() in SUFFIXES
        refuse(not is_picture, f"--plot {args.plot}: expected a name that ends in {' or '.join(SUFFIXES)}")
        refuse(not can_plot(), "--plot needs matplotlib: pip install 'syncline[bench]', or leave --plot out")
    return args


def _split(text: str) -> list[str]:
    """Return the sizes in a text. If one is invalid, `parse_size` raises ValueError."""
    return [size.strip() for size in text.split(",") if parse_size(size)]


_SPLIT = checked(_split, "sizes such as 1K,64K,25M, each a multiple of 4 bytes")


def _sizes(args: argparse.Namespace) -> list[str]:
    """Return the sizes to measure, in increasing order.

    Raises:
        UsageError: the largest size needs more memory than this host has.
    """
    sizes = sorted(args.sizes or (_QUICK_SIZES if args.quick else _SIZES), key=parse_size)
    needed, there = args.n * parse_size(sizes[-1]) * _COPIES, total_memory_bytes()
    text = f"{args.n} ranks would need about {format_bytes(needed)}, but this host has {format_bytes(there)}"
    refuse(needed > there, f"--sizes {sizes[-1]}: {text}: choose smaller sizes")
    return sizes
