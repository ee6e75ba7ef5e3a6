"""What `syncline run` understands: torchrun's options, a short name, and a help that can be read."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.run import get_args_parser

__all__ = ["UsageError", "parse"]

_HELP = """\
usage: syncline run [-n N] [options] SCRIPT [arguments]
       syncline run [-n N] [options] -m MODULE [arguments]

Start a program on N processes of this host (or of several) and wait for them. Each process finds its rank in
the environment; `sl.init()` reads it. Lines are shown with the rank that printed them. When a process fails
the others are ended, and its traceback is the last thing shown.

  syncline run -n 2 train.py --epochs 2        two processes; what follows the script is the script's
  syncline run -n gpu -m package.train         one process for each GPU
  syncline run -n 8 --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 train.py
                                               two hosts; on the other one the same with --node-rank 1

processes
  -n, --nproc-per-node N    processes on this host: a number, auto, cpu or gpu (default: 1)
  --max-restarts N          start all again up to N times when one fails (default: 0)
  -m, --module              SCRIPT is a module, as in python -m
  --no-python               SCRIPT is a command, run without python
  --shutdown-timeout SEC    after Ctrl-C, let processes go on for so long (default: 5; torch 2.12 and later)

hosts
  --nnodes N                number of hosts, or MIN:MAX (default: 1)
  --node-rank I             which of them this is, from 0
  --master-addr HOST        where rank 0 is
  --master-port PORT        a free port there (default on one host: any free one)
  --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf, --standalone, --local-addr
                            other ways to meet, as in torchrun

output
  --log-dir DIR             keep what every process prints in DIR
  -t, --tee; -r, --redirects; --local-ranks-filter
                            torchrun's own files and filters
  --verbose                 show what torch's launcher logs

The other options of torchrun are taken too:
{others}

Ctrl-C and SIGTERM go to all processes; a second one kills them. The exit code is that of the process that
failed first (128 + number for a signal), and 2 for wrong usage.
"""


class UsageError(Exception):
    """The command line cannot be carried out; the text says why and what to do."""


class _Parser(argparse.ArgumentParser):
    """Torchrun's parser, but its errors are for `main` to show."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def format_help(self) -> str:
        shown = {option for option in _HELP.replace(",", " ").replace(";", " ").split() if option[0] == "-"}
        others = [
            name
            for action in self._actions
            if not shown & set(action.option_strings)
            for name in action.option_strings[:1]
        ]
        return _HELP.format(
            others=textwrap.fill(", ".join(others), 108, initial_indent="  ", subsequent_indent="  ")
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Torchrun's namespace for these arguments.

    `nproc_per_node` may still be a word. `master_port` is None unless it was given. A `--` between script and
    arguments is dropped.

    Raises:
        UsageError: an option is unknown, incomplete or of the wrong type, or the script is missing.
    """
    torch_parser = get_args_parser()
    parser = _Parser(prog="syncline run", parents=[torch_parser], add_help=False, conflict_handler="resolve")
    parser.add_argument("-n", dest="nproc_per_node", default=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true")
    if isinstance(parser.get_default("master_port"), int):  # torch 2.11's default, not a wish of the user
        parser.set_defaults(master_port=None)
    try:
        found, unknown = parser.parse_known_args(list(argv))
    except UsageError as error:
        unknown = _unknown_options(parser, argv) if "required" in str(error) else []
        if not unknown:
            raise UsageError(_in_plain_words(str(error))) from None
    if unknown:
        raise UsageError(_about_unknown(parser, unknown[0]))
    if found.training_script_args[:1] == ["--"]:
        del found.training_script_args[0]
    return found


def _unknown_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """For a line without a script, where every word that looks like an option should be one of ours."""
    known = [option for action in parser._actions for option in action.option_strings]
    words = [word.partition("=")[0] for word in argv if word.startswith("--") and word != "--"]
    return [word for word in words if not any(option.startswith(word) for option in known)]


def _about_unknown(parser: argparse.ArgumentParser, option: str) -> str:
    known = [name for action in parser._actions for name in action.option_strings]
    name = option.partition("=")[0]
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]}?" if near else "see syncline run --help"
    return f"unknown option {name}: {remedy} (options of the program follow its name)"


def _in_plain_words(message: str) -> str:
    if "training_script" in message and "required" in message:
        return "no script given: syncline run -n 2 SCRIPT [arguments]; see syncline run --help"
    return f"{message}; see syncline run --help"
