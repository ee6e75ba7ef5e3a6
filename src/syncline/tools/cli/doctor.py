"""`syncline doctor`: check this host, or check that a script's training step has the same results in each run.

The step is run twice on each rank, and once on all ranks with the same batch.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.run import check_program
from syncline.tools.cli.values import RANKS, STEP
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.worker import worker_command
from syncline.words import MAX_COLUMNS, format_count

_HELP = """\
usage: syncline doctor
       syncline doctor [-n RANKS] [--step K] [--continue] SCRIPT [arguments]
       syncline doctor [-n RANKS] [--step K] [--continue] -m MODULE [arguments]

Without a script: check whether this host is fit for training in parallel.

With a script: run the script unchanged on several processes, up to its first
training step with a DistributedDataParallel (torch's or Syncline's). Compute this
step twice on each rank, and once on all ranks with rank 0's batch and random
numbers. All results must be equal, bit for bit. If they are not, print the first
module with different results, and the causes that were found.

  syncline doctor -n 2 train.py --epochs 1    --epochs is an option of train.py
  syncline doctor -n 2 --step 100 train.py    a later step: have replicas drifted?

  -n RANKS        number of processes, from 1 (default: 2)
  --step K        examine the K-th training forward of a wrapped module (default: 1)
  --continue      let the script continue afterwards, and examine each wrapped module
  -m, --module    SCRIPT is a module, as in python -m
  -h, --help      show this text

Exit code: 0 if nothing differs; 1 if something differs, or if this host is not fit
for training; 2 for wrong usage, or if there was no such step; the exit code of the
script if the script failed.
"""

_NAME = "syncline doctor"


def main(argv: Sequence[str]) -> int:
    """Run `syncline doctor` with these arguments.

    Returns:
        The exit code. 0 means that all results are equal, or that the host is fit for training. 1 means that results
        differ, or that the host is not fit. 2 means that the script had no step to examine. If the script failed, the
        result is the exit code of the rank that failed first.

    Raises:
        UsageError: the arguments are invalid. No rank was started.
    """
    args = _parse(argv)
    with Guardian(environment.for_child({})) as guardian:
        return _examine_script(args, guardian) if args.training_script else _examine_host(guardian)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("syncline doctor", _HELP, has_program=True)
    parser.add_argument("-n", type=RANKS, default=2)
    parser.add_argument("--step", type=STEP, default=1)
    parser.add_argument("--continue", dest="continues", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    args = parser.parse_all(argv)
    if args.training_script:
        check_program(args.training_script, is_module=args.module)
    elif argv:
        raise UsageError("expected SCRIPT or -m MODULE after the options. To check this host, leave out all")
    return args


# ---------------------------------------------------------------------- a script


def _examine_script(args: argparse.Namespace, guardian: Guardian) -> int:
    from syncline.tools.doctor.watch import WatchOptions
    from syncline.tools.launch.supervise import run_on_this_host

    report = guardian.folder / "reports.jsonl"
    options = WatchOptions(step=args.step, continues=args.continues, report=str(report))
    command = worker_command(
        [args.training_script, *args.training_script_args],
        is_module=args.module,
        before=("syncline.tools.doctor.watch", json.dumps(asdict(options))),
    )
    ranks = format_count(args.n, "rank")
    say(_NAME, f"starting {ranks}, which run {args.training_script} to training forward {args.step}")
    code = run_on_this_host(args.n, command, guardian)
    found = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    for one in found:
        print(one["text"])
    if code:
        return code
    if not found:
        say(
            _NAME,
            f"{args.training_script} ended before training forward {args.step} of a module in a "
            "DistributedDataParallel, so there was no step to examine. A training forward is a forward in training "
            "mode with gradients enabled, in a process that doctor started. If the script uses no "
            "DistributedDataParallel, or starts processes itself, call sl.debug.compare_replicas in the script",
        )
        return 2
    return 0 if all(one["agrees"] for one in found) else 1


# ---------------------------------------------------------------------- this host


def _examine_host(guardian: Guardian) -> int:
    say(_NAME, "examining this host ...")  # the imports take seconds
    from syncline.tools.doctor.host import findings
    from syncline.tools.launch.supervise import run_on_this_host

    found = findings()
    for finding in found:
        _show(finding.name, finding.text, finding.kind)
    if any(finding.kind == "problem" for finding in found):
        return 1
    output = guardian.folder / "transport"
    command = worker_command(["syncline.tools.doctor.host", str(output)], is_module=True)
    say(_NAME, "connecting two ranks ...")
    if run_on_this_host(2, command, guardian):
        text = "could not connect on this host, or their sum was wrong: see the error above"
        _show("two ranks", text, "problem")
        return 1
    _show("two ranks", f"connected, and computed a sum over {output.read_text()}", "fine")
    return 0


def _show(name: str, text: str, kind: str) -> None:
    mark = {"fine": "   ", "note": " ! ", "problem": "!! "}[kind]
    first = f"{mark}{name:<19}"
    print(
        textwrap.fill(text, MAX_COLUMNS, initial_indent=first, subsequent_indent=" " * len(first)), flush=True
    )
