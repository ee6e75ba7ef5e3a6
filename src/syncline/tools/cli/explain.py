"""`syncline explain`: one step of a script, in words and as a picture.

The script runs on a few ranks, as under `syncline run`. An import of torch takes seconds, so `main` imports what needs
torch, after the command line was checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.run import check_program, check_system
from syncline.tools.cli.values import STEP, number
from syncline.tools.explain.picture import Style
from syncline.tools.explain.report import SETTLED_STEP, Options, Report, nothing_shown, text_of
from syncline.tools.launch.display import DisplayOfRank0
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.worker import worker_command
from syncline.words import MAX_COLUMNS, format_count

_HELP = """\
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

_NAME = "syncline explain"

_RANKS = number(int, "a number of ranks from 1 to 8 (syncline plan predicts a step of more)", 1, 8)
"""Each rank is a process that imports torch. A picture of a step of more ranks on one host says nothing new."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline explain` with these arguments.

    Returns:
        The exit code. 0 means that a step was shown, and 1 that there was none. If the script failed, the result is the
        exit code of the rank that failed first. If a signal ended the command, it is 128 + the number of the signal.

    Raises:
        UsageError: the arguments are invalid.
    """
    args = _parse(argv)
    program = args.training_script
    say(
        _NAME,
        f"running {program} on {format_count(args.n, 'rank')}, up to step {args.step or SETTLED_STEP}",
    )
    from syncline.tools.launch.supervise import run_on_this_host

    with Guardian(environment.for_child({})) as guardian:
        path = guardian.folder / "report.json"
        options = Options(num_ranks=args.n, step=args.step, report=str(path))
        command = worker_command(
            [program, *args.training_script_args],
            is_module=args.module,
            before=("syncline.tools.explain.ranks", json.dumps(asdict(options))),
        )
        code = run_on_this_host(args.n, command, guardian, prefix="", display=DisplayOfRank0())
        report = Report.decode(path.read_text(encoding="utf-8")) if path.exists() else Report(step=0)
    if code:
        return code
    if not report.step:
        say(_NAME, nothing_shown(report, program))
        return 1
    print(text_of(report, options, _style(is_ascii=args.ascii)))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(_NAME, _HELP, has_program=True)
    parser.add_argument("-n", type=_RANKS, default=2)
    parser.add_argument("--step", type=STEP)
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    args = parser.parse_all(argv)
    if args.training_script is None:
        raise UsageError(
            "expected a script: syncline explain SCRIPT [arguments]; see syncline explain --help"
        )
    check_system()
    check_program(args.training_script, is_module=args.module)
    return args


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
