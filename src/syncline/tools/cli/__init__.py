"""The command line `syncline`. This module runs the command that the user names; commands that are alike share one.

bench.py     `syncline bench`
examples.py  `syncline examples`
options.py   the parser class of all commands, and the options of `syncline run`
output.py    messages, files that are written, and output that cannot be written
plan.py      `syncline plan`, also with `--tune`
report.py    the commands that read traces: `syncline report`, `syncline compare` and `syncline watch`
run.py       `syncline run`
scripts.py   the commands that run a script up to one of its steps: `syncline doctor` and `syncline explain`
values.py    the types of options: numbers, times, sizes and paths
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

from syncline.tools.cli import bench, examples, plan, report, run, scripts
from syncline.tools.cli.options import UsageError, did_you_mean
from syncline.tools.cli.output import EXIT_BROKEN_PIPE, Output, say
from syncline.tools.launch.display import EXIT_OUTPUT_LOST
from syncline.words import printable

__all__ = ["main"]


_COMMANDS = {
    "run": run.main,
    "explain": scripts.explain,
    "report": report.report,
    "compare": report.compare,
    "watch": report.watch,
    "plan": plan.main,
    "bench": bench.main,
    "doctor": scripts.doctor,
    "examples": examples.main,
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
  examples  write the example programs of the documentation into a folder

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
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name == "help" and arguments:
        name, arguments = arguments[0], ["--help", *arguments[1:]]
    program = f"syncline {name}" if name in _COMMANDS else "syncline"
    code = 0
    with Output() as output:
        try:
            code = _run(name, arguments)
        except UsageError as error:
            code = 2
            say(program, printable(str(error)))
        except SystemExit as ended:  # help was shown, or the ranks of a measurement have failed
            code = int(ended.code or 0)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except OSError as error:
            if output.failure is None:
                if error.filename is None:
                    raise
                code = 2
                say(program, printable(f"cannot use {error.filename}: {error.strerror}"))
    if code or output.failure is None:
        return code
    if isinstance(output.failure, BrokenPipeError):
        return EXIT_BROKEN_PIPE  # a reader that has left needs no message
    say("syncline", f"the output could not be written: {output.failure.strerror}")
    return EXIT_OUTPUT_LOST


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in _COMMANDS:
        return _COMMANDS[name](arguments)
    if name == "--version":
        syncline, torch = metadata.version("syncline"), metadata.version("torch")
        print(f"syncline {syncline} (torch {torch}, Python {platform.python_version()})")
    elif name in ("-h", "--help", "help"):
        print(_HELP, end="")
    elif name:
        near = did_you_mean(name, [*_COMMANDS, "--help", "--version"])
        script = f": did you mean: syncline run {name}?" if name.endswith(".py") else ""
        expected = f": expected {', '.join(_COMMANDS)}; see syncline --help"
        raise UsageError(f"unknown command {name!r}{script or near or expected}")
    else:
        say("", _HELP.rstrip())
        return 2
    return 0
