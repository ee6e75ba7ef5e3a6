"""`syncline doctor`: is this host fit, and does a script compute the same, twice and on every rank?

Functions import what needs torch, which takes seconds, so that help and mistakes are answered without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.run import check_program
from syncline.tools.launch.guardian import Guardian

_HELP = """\
usage: syncline doctor
       syncline doctor [-n RANKS] [--step K] [--continue] SCRIPT [arguments]
       syncline doctor [-n RANKS] [--step K] [--continue] -m MODULE [arguments]

Without a script: is this host fit for training in parallel?

With one: run it on several processes, unchanged, up to its first training step
with a DistributedDataParallel (torch's or Syncline's). That step is computed
twice on each rank, and once on all with rank 0's batch and random numbers: it
has to be the same, bit for bit. If it is not, the first module that makes
something else is named, with the causes that were seen.

  syncline doctor -n 2 train.py --epochs 1    what follows the script is its own
  syncline doctor -n 2 --step 100 train.py    a later step: have replicas drifted?

  -n RANKS        processes, from 1 (default: 2)
  --step K        examine the K-th training forward of a wrapped module (default: 1)
  --continue      let the script continue afterwards, and examine each wrapped module
  -m, --module    SCRIPT is a module, as in python -m
  -h, --help      show this text

Exit code: 0, nothing differs; 1, something does, or this host is not fit; 2, wrong
usage, or there was no such step; else that of the script, where it failed.
"""

_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Run `syncline doctor` with these arguments.

    Returns:
        0 if nothing differs; 1 if something differs or the host is not fit; 2 for wrong usage, or if there was nothing
        to examine; else the exit code of the script's rank that failed first.
    """
    try:
        args = _parse(argv)
    except UsageError as error:
        print(f"syncline doctor: {error}", file=sys.stderr)
        return 2
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    with Guardian(environment.for_child({})) as guardian:
        return _examine(args, guardian) if args.script else _look_at_the_host(guardian)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline doctor", _HELP)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_all(argv, what="option", hint=" (options of the program follow its name)")
    if args.n < 1:
        raise UsageError(f"-n {args.n}: expected at least 1 process")
    if args.step < 1:
        raise UsageError(f"--step {args.step}: expected at least 1, the first training forward")
    if args.module and not args.script:
        raise UsageError("-m: expected the name of a module")
    if not args.script and argv:
        raise UsageError(
            f"{argv[0]}: expected a script after this option; without a script, doctor checks the host"
        )
    if args.script:
        check_program(args.script, is_module=args.module, is_python=True)
    if args.arguments[:1] == ["--"]:
        del args.arguments[0]
    return args


# ---------------------------------------------------------------------- a script


def _examine(args: argparse.Namespace, guardian: Guardian) -> int:
    from syncline.tools.doctor.watch import Orders
    from syncline.tools.launch.supervise import worker_command

    report = guardian.folder / "reports.jsonl"
    orders = Orders(step=args.step, goes_on=args.goes_on, report=str(report))
    command = worker_command(
        [args.script, *args.arguments],
        is_module=args.module,
        before=("syncline.tools.doctor.watch", orders.dumped()),
    )
    code = _launch(args.n, command, guardian)
    found = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    for one in found:
        print(one["text"])
    if code:
        return code
    if not found:
        print(
            f"syncline doctor: {args.script} ended, and there was no training forward {args.step} of a module in a "
            "DistributedDataParallel in these processes (in training mode, with gradients). Without a wrapper, or in "
            "processes that the script itself starts, call sl.debug.assert_replicas_agree in it",
            file=sys.stderr,
        )
        return 2
    return 0 if all(one["agrees"] for one in found) else 1


def _launch(num_ranks: int, command: Sequence[str], guardian: Guardian) -> int:
    from syncline.tools.launch.supervise import Job, config_for_this_host, supervise

    config = config_for_this_host(num_ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = environment.export({"OMP_NUM_THREADS": str(max(1, cores // num_ranks))})
    folder = guardian.folder / "launcher"
    folder.mkdir()
    try:
        return supervise(
            Job(config=config, command=sys.executable, arguments=command, scratch=folder, guardian=guardian)
        )
    finally:
        environment.restore(before)


# ---------------------------------------------------------------------- this host


def _look_at_the_host(guardian: Guardian) -> int:
    from syncline.tools.doctor.host import findings
    from syncline.tools.launch.supervise import worker_command

    found = findings()
    for finding in found:
        _show(finding.name, finding.text, finding.kind)
    if any(finding.kind == "problem" for finding in found):
        return 1
    name = guardian.folder / "transport"
    code = _launch(2, worker_command(["syncline.tools.doctor.host", str(name)], is_module=True), guardian)
    if code:
        _show("two ranks", "could not connect on this host, see above", "problem")
        return 1
    _show("two ranks", f"met, and added up over {name.read_text()}", "fine")
    return 0


def _show(name: str, text: str, kind: str) -> None:
    mark = {"fine": "   ", "note": " ! ", "problem": "!! "}[kind]
    first = f"{mark}{name:<19}"
    print(textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)), flush=True)
