"""`syncline doctor` and `syncline explain`, which run a script on ranks of this host up to one of its steps.

doctor checks that the step has the same results in each run: it is run twice on each rank, and once on all ranks with
the same batch. Without a script, doctor checks this host. explain shows the step in words and as a picture.

An import of torch takes seconds. Functions that need torch therefore import it themselves, so that help texts and
errors about the command line appear without a wait for torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.run import check_program, check_system
from syncline.tools.cli.values import RANKS, STEP, number
from syncline.tools.explain.report import SETTLED_STEP, Options, Report, Style, nothing_shown, text_of
from syncline.tools.launch.display import DisplayOfRank0
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.worker import worker_command
from syncline.words import MAX_COLUMNS, format_count

_DOCTOR_HELP = """\
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

_EXPLAIN_HELP = """\
usage: syncline explain [-n RANKS] [--step N] SCRIPT [arguments]
       syncline explain [-n RANKS] [--step N] -m MODULE [arguments]

Show what one training step of a script does, without a cluster: the contract, the
step's timeline in words, and a picture of the step. The script runs on RANKS ranks,
which are processes of this host, as under syncline run. It is ended after the step.
Only the output of rank 0 is shown.

  syncline explain train.py --lr 0.1          --lr is an option of train.py
  syncline explain -n 4 train.py              buckets and shards of a job of 4 ranks

  -n RANKS        number of ranks, at most 8 (default: 2); for more, syncline plan
                  predicts a step
  --step N        show the N-th step (default: the third, which has its final buckets;
                  if ranks send nothing in it, the first later one in which they do,
                  up to step 100)
  --ascii         draw the picture in ASCII
  -m, --module    SCRIPT is a module, as in python -m
  -h, --help      show this text

All times were measured on this host, which the ranks share. Nothing is saved by
sl.Checkpointer and sl.trace; what the script itself writes or prints until the step
has ended is not prevented.

Exit code: 0; 1 if there was no step to show; 2 for wrong usage; the exit code of the
script if the script failed.
"""

_DOCTOR, _EXPLAIN = "syncline doctor", "syncline explain"

_RANKS = number(int, "a number of ranks from 1 to 8 (syncline plan predicts a step of more)", 1, 8)
"""Each rank is a process that imports torch. A picture of a step of more ranks on one host says nothing new."""


def _parsed(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command that can run a script, and check the script if there is one."""
    parser.add_argument("-m", "--module", action="store_true")
    args = parser.parse_all(argv)
    if args.training_script is not None:
        check_system()
        check_program(args.training_script, is_module=args.module)
    return args


def _run_script(
    args: argparse.Namespace, guardian: Guardian, module: str, options: Mapping[str, Any], **how: Any
) -> int:
    """Run the script on ranks, in which `main` of a module is called first with these options. Return the exit code."""
    from syncline.tools.launch.supervise import run_on_this_host

    program = [args.training_script, *args.training_script_args]
    command = worker_command(program, is_module=args.module, before=(module, json.dumps(options)))
    return run_on_this_host(args.n, command, guardian, **how)


# ---------------------------------------------------------------------- doctor


def doctor(argv: Sequence[str]) -> int:
    """Run `syncline doctor` with these arguments.

    Returns:
        The exit code. 0 means that all results are equal, or that the host is fit for training. 1 means that results
        differ, or that the host is not fit. 2 means that the script had no step to examine. If the script failed, the
        result is the exit code of the rank that failed first.

    Raises:
        UsageError: the arguments are invalid. No rank was started.
    """
    parser = CommandParser(_DOCTOR, _DOCTOR_HELP, has_program=True)
    parser.add_argument("-n", type=RANKS, default=2)
    parser.add_argument("--step", type=STEP, default=1)
    parser.add_argument("--continue", dest="continues", action="store_true")
    args = _parsed(parser, argv)
    if args.training_script is None and argv:
        raise UsageError("expected SCRIPT or -m MODULE after the options. To check this host, leave out all")
    with Guardian(environment.for_child({})) as guardian:
        return _examine_script(args, guardian) if argv else _examine_host(guardian)


def _examine_script(args: argparse.Namespace, guardian: Guardian) -> int:
    report, program = guardian.folder / "reports.jsonl", args.training_script
    ranks = format_count(args.n, "rank")
    say(_DOCTOR, f"starting {ranks}, which run {program} to training forward {args.step}")
    options = {"step": args.step, "continues": args.continues, "report": str(report)}
    code = _run_script(args, guardian, "syncline.tools.doctor.watch", options)
    found = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    for one in found:
        print(one["text"])
    if code:
        return code
    if not found:
        say(
            _DOCTOR,
            f"{program} ended before training forward {args.step} of a module in a DistributedDataParallel, so there "
            "was no step to examine. A training forward is a forward in training mode with gradients enabled, in a "
            "process that doctor started. If the script uses no DistributedDataParallel, or starts processes itself, "
            "call sl.debug.compare_replicas in the script",
        )
        return 2
    return 0 if all(one["agrees"] for one in found) else 1


def _examine_host(guardian: Guardian) -> int:
    say(_DOCTOR, "examining this host ...")  # the imports take seconds
    from syncline.tools.doctor.host import findings
    from syncline.tools.launch.supervise import run_on_this_host

    found = findings()
    for finding in found:
        _show(finding.name, finding.text, finding.kind)
    if any(finding.kind == "problem" for finding in found):
        return 1
    output = guardian.folder / "transport"
    command = worker_command(["syncline.tools.doctor.host", str(output)], is_module=True)
    say(_DOCTOR, "connecting two ranks ...")
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


# ---------------------------------------------------------------------- explain


def explain(argv: Sequence[str]) -> int:
    """Run `syncline explain` with these arguments.

    Returns:
        The exit code. 0 means that a step was shown, and 1 that there was none. If the script failed, the result is the
        exit code of the rank that failed first. If a signal ended the command, it is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid.
    """
    parser = CommandParser(_EXPLAIN, _EXPLAIN_HELP, has_program=True)
    parser.add_argument("-n", type=_RANKS, default=2)
    parser.add_argument("--step", type=STEP)
    parser.add_argument("--ascii", action="store_true")
    args = _parsed(parser, argv)
    program = args.training_script
    if program is None:
        raise UsageError(
            "expected a script: syncline explain SCRIPT [arguments]; see syncline explain --help"
        )
    ranks = format_count(args.n, "rank")
    say(_EXPLAIN, f"running {program} on {ranks}, up to step {args.step or SETTLED_STEP}")
    with Guardian(environment.for_child({})) as guardian:
        path, display = guardian.folder / "report.json", DisplayOfRank0()
        options = Options(num_ranks=args.n, step=args.step, report=str(path))
        module = "syncline.tools.explain.ranks"
        code = _run_script(args, guardian, module, asdict(options), prefix="", display=display)
        report = Report.decode(path.read_text(encoding="utf-8")) if path.exists() else Report(step=0)
    is_complete = report.step > 0 and options.is_enough(report.step, meets_others=report.meets_others)
    if code and not is_complete:  # a rank may also fail after the step, such as one with fewer batches
        return code
    if not report.step:
        say(_EXPLAIN, nothing_shown(report, program))
        return 1
    print(text_of(report, options, _style(is_ascii=args.ascii)))
    return code


def _style(*, is_ascii: bool) -> Style:
    is_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size((MAX_COLUMNS, 24)).columns if is_terminal else MAX_COLUMNS
    return Style(
        columns=min(MAX_COLUMNS, max(60, columns)),
        has_blocks=not is_ascii and _can_print_blocks(),
        has_colours=is_terminal and environment.wants_colours(),
    )


def _can_print_blocks() -> bool:
    try:
        "█░▶…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
