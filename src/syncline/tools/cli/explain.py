"""`syncline explain`: one dry step of a script, in words and as a picture.

The script runs in a process of its own, so that it finds a fresh interpreter. This module needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from syncline import environment
from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.output import say
from syncline.tools.cli.run import check_program
from syncline.tools.cli.values import STEP, integer
from syncline.tools.explain.picture import Style
from syncline.tools.explain.report import SETTLED_STEP, Options, Report, nothing_shown, text_of
from syncline.tools.launch.command import worker_command
from syncline.words import MAX_COLUMNS, format_count

_HELP = """\
usage: syncline explain [-n RANKS] [--step N] SCRIPT [arguments]
       syncline explain [-n RANKS] [--step N] -m MODULE [arguments]

Show what one training step of a script does, without a cluster: the contract, the
step's timeline in words, and a picture of the step. The script runs in one process,
as rank 0 of a job with RANKS ranks. The other ranks are imitated: each does what
this rank does. The script is ended after one step.

  syncline explain train.py --lr 0.1          --lr is an option of train.py
  syncline explain -n 64 train.py             buckets and shards of a job of 64 ranks

  -n RANKS        number of ranks of the job (default: 2)
  --step N        show the N-th step (default: the third, which has its final buckets;
                  if ranks send nothing in it, the first later one in which they do,
                  up to step 100)
  --ascii         draw the picture in ASCII
  -m, --module    SCRIPT is a module, as in python -m
  -h, --help      show this text

Sizes, and the times of this rank's own work, are real. Times of communication cannot
be measured in one process. Nothing is saved by sl.Checkpointer and sl.trace; what
the script itself writes or prints until the step has ended is not prevented.

Exit code: 0; 1 if there was no step to show; 2 for wrong usage; the exit code of the
script if the script failed.
"""

_NAME = "syncline explain"

_RANKS = integer("a number of ranks", 1, 100_000)
"""The other ranks are imitated, so there can be many."""


def main(argv: Sequence[str]) -> int:
    """Run `syncline explain` with these arguments.

    Returns:
        The exit code. 0 means that a step was shown, and 1 that there was none. If the script failed, the result is its
        exit code, or 128 + the number of the signal that ended it.

    Raises:
        UsageError: the arguments are invalid.
    """
    args = _parse(argv)
    program = args.training_script
    with tempfile.TemporaryDirectory(prefix="syncline-explain-") as folder:
        path = Path(folder, "report.json")
        options = Options(num_ranks=args.n, step=args.step, report=str(path))
        until = f"step {args.step or SETTLED_STEP}"
        say(
            _NAME,
            f"running {program} as rank 0 of {args.n}, up to {until}; other ranks are imitated",
        )
        code = _run(args, options)
        report = Report.decode(path.read_text(encoding="utf-8")) if path.exists() else None
    if code:
        steps = 0 if report is None else report.step
        say(_NAME, f"{program} ended with exit code {code} after {format_count(steps, 'complete step')}")
        return code
    if report is None or not report.step:
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
    check_program(args.training_script, is_module=args.module, is_python=True)
    return args


def _run(args: argparse.Namespace, options: Options) -> int:
    """Run the script in a process of its own, and return its exit code."""
    command = worker_command(
        [args.training_script, *args.training_script_args],
        is_module=args.module,
        before=("syncline.tools.explain.dry_run", json.dumps(asdict(options))),
    )
    variables = environment.for_child(environment.explained(args.n))
    with subprocess.Popen([sys.executable, *command], env=variables) as process:
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                if not _is_in_terminal():  # a terminal sends Ctrl-C to the script, too
                    process.send_signal(signal.SIGINT)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _is_in_terminal() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # no terminal, a closed stdin, or Windows
        return False


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
