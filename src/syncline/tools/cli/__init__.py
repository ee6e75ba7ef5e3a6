"""The command line `syncline`, with one module per command. This module runs the command that the user names.

bench.py     `syncline bench`
doctor.py    `syncline doctor`
explain.py   `syncline explain`
options.py   the parser class of all commands, and the options of `syncline run`
output.py    messages about progress, and output that cannot be written
plan.py      `syncline plan`
report.py    `syncline report` and `syncline compare`
run.py       `syncline run`
tune.py      `syncline plan --tune`
values.py    checks of numbers and files, before a command begins its work
watch.py     `syncline watch`
"""

from __future__ import annotations

import difflib
import platform
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

from syncline.tools.cli import bench, doctor, explain, plan, report, run, watch
from syncline.tools.cli.options import UsageError
from syncline.tools.cli.output import EXIT_BROKEN_PIPE, Output, say
from syncline.tools.launch.display import EXIT_OUTPUT_LOST
from syncline.words import printable

__all__ = ["main"]


_COMMANDS = {
    "run": run.main,
    "explain": explain.main,
    "report": report.report,
    "compare": report.compare,
    "watch": watch.main,
    "plan": plan.main,
    "bench": bench.main,
    "doctor": doctor.main,
}

_HELP = """\
usage: syncline COMMAND ...

Data-parallel PyTorch whose synchronization you can read, choose and trust.

commands
  run       start a program on several processes, as torchrun does
  explain   show one step of a program in words and as a picture, without a cluster
  report    say where the time of a step goes, from the trace of a run
  compare   put two traced runs side by side
  watch     show what each rank of a run is doing now, or where it hangs
  plan      predict a step on a cluster for each way to synchronize, and recommend one
  bench     measure this machine: all_reduce by size, and a training step
  doctor    check this host, or find results that differ between two runs or ranks

options
  -h, --help    show this text; syncline COMMAND --help shows the options of a command
  --version     show the versions of Syncline, torch and Python

Exit codes of all commands: 2 for wrong usage; 74 if the output could not be written,
for example to a full disk. The help of a command says what its other codes mean.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `syncline` command.

    Args:
        argv: the arguments of the command. None means the arguments of this process.

    Returns:
        The exit code. 2 means that the command line is wrong, and 74 that the output could not be written.
    """
    code = 0
    with Output() as output:
        try:
            code = _run(argv)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except OSError as error:
            if output.failure is None and error.filename is None:
                raise
            if output.failure is None:
                say("syncline", f"cannot use {error.filename}: {error.strerror}")
                code = 2
    return code or _output_lost(output.failure)


def _output_lost(error: OSError | None) -> int:
    """Print why output could not be written, and return the exit code. A reader that has left needs no message."""
    if error is None:
        return 0
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    say("syncline", f"the output could not be written: {error.strerror}")
    return EXIT_OUTPUT_LOST


def _run(argv: Sequence[str] | None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in _COMMANDS:
        return _run_command(name, arguments)
    if name == "help" and arguments:
        name, *rest = arguments
        return _run_command(name, ["--help", *rest]) if name in _COMMANDS else _refuse(name)
    if name in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if name == "--version":
        syncline, torch = metadata.version("syncline"), metadata.version("torch")
        print(f"syncline {syncline} (torch {torch}, Python {platform.python_version()})")
        return 0
    if not name:
        say("", _HELP.rstrip())
        return 2
    return _refuse(name)


def _refuse(name: str) -> int:
    """Print that there is no such command, and return the exit code."""
    near = difflib.get_close_matches(name, [*_COMMANDS, "--help", "--version"], n=1)
    remedy = f"did you mean {near[0]}?" if near else f"expected {', '.join(_COMMANDS)}; see syncline --help"
    if name.endswith(".py"):
        remedy = f"did you mean: syncline run {name}?"
    say("syncline", f"unknown command {name!r}: {remedy}")
    return 2


def _run_command(name: str, arguments: Sequence[str]) -> int:
    try:
        return _COMMANDS[name](arguments)
    except UsageError as error:
        say(f"syncline {name}", printable(str(error)))
        return 2
    except SystemExit as help_was_shown:
        return int(help_was_shown.code or 0)
