"""The command line, with one module per command. This module selects the command by name.

__main__.py  `python -m syncline.tools.cli`
bench.py     `syncline bench`
doctor.py    `syncline doctor`
options.py   parsers of command line options, and the help of `syncline run`
run.py       `syncline run`
"""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from syncline.tools.cli import bench, doctor, run

__all__ = ["main"]


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (run.main, "start a program on several processes, as torchrun does"),
    "bench": (bench.main, "measure it on this machine, against Gloo and MPI"),
    "doctor": (doctor.main, "find results that differ between two runs or between ranks"),
}

_HELP = """\
usage: syncline COMMAND ...

Data-parallel PyTorch whose synchronization you can read, choose and trust.

commands
{commands}

options
  -h, --help    show this text; syncline COMMAND --help shows a command's own
  --version     show the versions of Syncline, torch and Python
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `syncline` command.

    Args:
        argv: the arguments; None means those of this process.

    Returns:
        The exit code; 2 for wrong usage.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if arguments and arguments[0] == "--version":
        print(_versions())
        return 0
    if not arguments:
        print(_help(), end="", file=sys.stderr)
        return 2
    near = difflib.get_close_matches(arguments[0], [*_COMMANDS, "--help", "--version"], n=1)
    remedy = f"did you mean {near[0]}?" if near else f"there is {', '.join(_COMMANDS)}; see syncline --help"
    if arguments[0].endswith(".py"):
        remedy = f"did you mean: syncline run {arguments[0]}?"
    print(f"syncline: no command {arguments[0]!r}: {remedy}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(map(len, _COMMANDS)) + 4
    lines = [f"  {name:<{width}}{about}" for name, (_, about) in _COMMANDS.items()]
    return _HELP.format(commands="\n".join(lines))


def _versions() -> str:
    found = f"syncline {metadata.version('syncline')}"
    return f"{found} (torch {metadata.version('torch')}, Python {platform.python_version()})"
