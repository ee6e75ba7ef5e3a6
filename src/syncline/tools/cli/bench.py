"""`syncline bench`: measure Syncline against Gloo on this machine, and print tables.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncline import environment
from syncline.tools.bench.machine import describe_machine, total_memory_bytes
from syncline.tools.bench.plot import SUFFIXES, can_plot, plot
from syncline.tools.bench.tables import parse_size, report, size_text
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.values import MOST_RANKS, check_input, check_number, check_output, write_file
from syncline.tools.launch.command import worker_command
from syncline.tools.launch.guardian import Guardian
from syncline.tools.plan import usual_path

if TYPE_CHECKING:
    from syncline.tools.bench.baseline import Measurement
    from syncline.tools.bench.ranks import Plan


_HELP = """\
usage: syncline bench [-n RANKS] [options]

Measure all_reduce by size and a training step on this machine: Syncline against
Gloo. The engines take turns in the same processes, so that other load on the machine
affects all of them. This takes about two minutes. Keep the machine idle meanwhile.

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
  --compare FILE        compare with the results of --json FILE from before, which
                        were measured with the same options on the same machine; the
                        exit status is 1 if a figure is worse by more than noise
  --plot FILE           draw the results in FILE, a .png or .svg; this needs
                        matplotlib: pip install 'syncline[bench]'
  -h, --help            show this text

The page "Benchmarks" of the documentation describes the measurement. Ctrl-C ends it
without a result.
"""

_NAME = "syncline bench"

_SIZES = "1K,16K,64K,256K,1M,4M,25M,100M"

_QUICK_SIZES = "1K,64K,1M"

_COPIES = 8
"""The largest number of tensors of one size that a rank and its engines keep in memory at once, approximately."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline bench` with these arguments.

    Returns:
        The exit code. 0 means that the measurement is complete. 1 means that a figure is worse than in the results of
        --compare. After a failure, the result is the exit code of the rank that failed first. If a signal ended the
        measurement, the result is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid, or the file of --compare was measured with other settings. Nothing was
            measured.
    """
    args = _parse(argv)
    if args.calibrate:
        return _calibrate(usual_path() if args.json is None else args.json)
    sizes = _sizes(args)
    before = None if args.compare is None else _baseline(args, sizes)
    say(_NAME, f"starting {args.n} ranks")
    transport = None if before is None else str(before.settings["transport"])
    plan = replace(_plan(args, sizes), transport=transport)
    from syncline.tools.bench.baseline import settings_of
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
    settings = settings_of(**{name: summary[name] for name in ("num_ranks", "machine", "plan", "transport")})
    if before is not None:
        # The transport is known only now. If it is another one, nothing was measured.
        _refuse_others(args.compare, before, settings)
    print(report(summary))
    figures = figures_of(summary)
    if goals := goals_table(figures):
        print(f"\nGoals\n{goals}")
    if args.quick:
        print("\n--quick: these results only show that the benchmark runs, not how fast the engines are")
    if args.json is not None:
        kept = {**summary, "settings": settings, "figures": to_json(figures)}
        write_file("--json", args.json, json.dumps(kept, indent=2) + "\n")
    if args.plot is not None:
        plot(summary, args.plot)
    return 0 if before is None else show_comparison(args.compare, before.figures, figures)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline bench", _HELP)
    parser.add_argument("-n", type=int)
    parser.add_argument("--sizes", action="append")
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", default=None)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_all(argv)
    if args.calibrate:
        _refuse_without_effect(args)
    args.n = 2 if args.n is None else args.n
    args.steps = args.steps is not False
    if args.n < 2:
        raise UsageError(
            f"-n {args.n}: expected at least 2 ranks, because one rank has no peer to synchronize with"
        )
    if args.compare is not None and args.quick:
        raise UsageError("--compare and --quick exclude each other: the times of --quick are not reliable")
    check_number("-n", args.n, 2, MOST_RANKS, "ranks")
    check_number("--rounds", args.rounds, 2, 100_000, "rounds")
    if args.compare is not None:
        check_input("--compare ", args.compare)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_output(option, path)
    if args.plot is not None and args.plot in (args.json, args.compare):
        raise UsageError(f"--plot {args.plot}: expected a file of its own, got that of another option")
    if args.plot is not None and args.plot.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {args.plot}: expected a file name that ends in {' or '.join(SUFFIXES)}")
    if args.plot is not None and not can_plot():
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
    options = {
        "-n": args.n,
        "--sizes": args.sizes,
        steps: args.steps,
        "--rounds": args.rounds,
        "--quick": args.quick,
        "--compare": args.compare,
        "--plot": args.plot,
    }
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"--calibrate and {', '.join(given)} exclude each other: --calibrate always makes the same measurement, "
            "and only --json applies to it"
        )


def _baseline(args: argparse.Namespace, sizes: list[int]) -> Measurement:
    """Return the earlier measurement of --compare.

    Raises:
        UsageError: the file cannot be read, has no figures, or was measured with other settings than `args` request.
    """
    from syncline.tools.bench.baseline import read_measurement, settings_of

    path = args.compare
    try:
        found = read_measurement(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--compare {path}: {error}") from None
    if not found.figures or "transport" not in found.settings:
        raise UsageError(f"--compare {path}: expected a file that syncline bench --json has written")
    plan = asdict(_plan(args, sizes))
    _refuse_others(path, found, settings_of(num_ranks=args.n, machine=describe_machine(), plan=plan))
    return found


def _refuse_others(path: Path, before: Measurement, settings: Mapping[str, object]) -> None:
    """Raise an error if the times of an earlier measurement cannot be compared with those of this one.

    Raises:
        UsageError: the settings differ.
    """
    from syncline.tools.bench.baseline import differences

    if different := differences(settings, before.settings):
        raise UsageError(
            f"--compare {path}: the file was measured with other settings ({different}): choose the options of that "
            "measurement, or measure it again"
        )


def _calibrate(path: Path) -> int:
    """Measure this machine, and write its figures to a file. Return the exit code.

    Raises:
        UsageError: the file cannot be written. Nothing was measured.
    """
    with contextlib.suppress(OSError):  # the check names what is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
    check_output("--calibrate", path)
    from syncline.tools.bench.measured import MeasurementFailed, calibrated

    try:
        machine = calibrated(lambda text: say(_NAME, text))
    except MeasurementFailed as failed:
        return failed.code
    write_file("--json", path, json.dumps(machine.to_json(), indent=1) + "\n")
    print(f"The figures of {machine.name} are in {path}")
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
    )
