"""Parsers of command line options.

Torchrun's options are written out here, so that help and a mistake are answered without importing torch, which takes
seconds. `tests/launch/test_run.py` compares them with torch's own parser.

What commands with options of their own have in common: a help to be read, and errors in one line.
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from syncline import environment

_HELP = """\
usage: syncline run [-n N] [options] SCRIPT [arguments]
       syncline run [-n N] [options] -m MODULE [arguments]

Start a program on N processes of this host (or of several) and wait for them.
Each finds its rank in the environment, where sl.init() looks. Every line shows
the rank that printed it. When one fails, the others are ended, and its traceback
is the last thing shown.

  syncline run -n 2 train.py --epochs 2       what follows the script is its own
  syncline run -n gpu -m package.train        one process for each GPU
  syncline run -n 8 --nnodes 2 --node-rank 0 --master-addr HOST \\
      --master-port 29500 train.py            on the second host: --node-rank 1

processes
  -n, --nproc-per-node N   how many on this host: a number, auto, cpu or gpu
                           (default: 1)
  -m, --module             SCRIPT is a module, as in python -m
  --no-python              SCRIPT is a command, run without python
  --max-restarts N         when one fails, start all again, N times at most
                           (default: 0)
  --shutdown-timeout SEC   how long they may run on after Ctrl-C (default: 5), or
                           SIGTERM, at which they may save (default: 30)

hosts
  --nnodes N               how many, or MIN:MAX (default: 1)
  --node-rank I            which of them this is, from 0
  --master-addr HOST       the host of rank 0
  --master-port PORT       a port that is free there (default on one host: any)
  --host ADDRESS           where this host listens for the others (default: the
                           loopback on one host; with several every interface,
                           see docs/security.md)
  --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf, --standalone,
  --local-addr             other kinds of rendezvous, as in torchrun

output
  --log-dir DIR            keep what each process prints in DIR
  --log-line-prefix-template TEXT
                           what precedes each line; ${{rank}}, ${{local_rank}},
                           ${{role_name}} and ${{hostname}} are replaced
  --tee, --redirects, --local-ranks-filter
                           torchrun's own log files and filters
  --verbose                also show what torch's launcher logs

These options of torchrun are accepted, too:
{others}

Ctrl-C and SIGTERM go to all processes; a second one kills them. SIGUSR1 goes to
them, too, and has no other effect. The exit code is that of the process that
failed first, 75 when all have stopped because they were asked to (see
sl.Checkpointer.stop_if_asked; they are not started again), 128 + number after
another end by a signal, and 2 for wrong usage.
"""


def _comma_separated_list(text: str) -> list[str]:
    """Return the items of `text`; two commas stand for one in an item."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


_VALUES: tuple[tuple[str, Callable[[str], Any], Any], ...] = (
    ("--nnodes", str, "1:1"),
    ("--nproc-per-node", str, "1"),
    ("--rdzv-backend", str, "static"),
    ("--rdzv-endpoint", str, ""),
    ("--rdzv-id", str, "none"),
    ("--rdzv-conf", str, ""),
    ("--max-restarts", int, 0),
    ("--monitor-interval", float, 0.1),
    ("--start-method", str, "spawn"),
    ("--event-log-handler", str, "null"),
    ("--role", str, "default"),
    ("--log-dir", str, None),
    ("--redirects", str, "0"),
    ("--tee", str, "0"),
    ("--log-line-prefix-template", str, ""),  # torchrun's from torch 2.15 on, here with all
    ("--local-ranks-filter", str, ""),
    ("--duplicate-stdout-filters", _comma_separated_list, []),
    ("--duplicate-stderr-filters", _comma_separated_list, []),
    ("--node-rank", int, 0),
    ("--master-addr", str, "127.0.0.1"),
    ("--master-port", int, None),
    ("--local-addr", str, None),
    ("--logs-specs", str, None),
    ("--numa-binding", str, None),
    ("--signals-to-handle", str, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    ("--shutdown-timeout", int, None),
)
"""Torchrun's options with a value: name, type, default. Without `--print-completion` (torch 2.15), which completes the
command `torchrun`, and returns before anything is started."""

_FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")

_SHORT = {"--module": "-m", "--redirects": "-r", "--tee": "-t"}

_CHOICES = {"--start-method": ("spawn", "fork", "forkserver")}

_ONLY_ON_THE_COMMAND_LINE = ("--logs-specs", "--numa-binding")
"""Torchrun takes the default of every other option from the environment, if it is there."""


class UsageError(Exception):
    """Raised when a command line cannot be carried out. The text says why and what to do."""


class _Parser(argparse.ArgumentParser):
    """Torchrun's options and ours; its errors are for `main` to show."""

    def __init__(self) -> None:
        super().__init__(prog="syncline run")
        for name, kind, default in _VALUES:
            inherited = (
                None if name in _ONLY_ON_THE_COMMAND_LINE else environment.torchrun_default(_dest(name))
            )
            self.add_argument(
                *_spellings(name),
                type=kind,
                choices=_CHOICES.get(name),
                default=default if inherited is None else inherited,
            )
        for name in _FLAGS:
            self.add_argument(*_spellings(name), action="store_true", default=_is_set(_dest(name)))
        self.add_argument("training_script")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)
        self.add_argument("-n", dest="nproc_per_node", default=argparse.SUPPRESS)
        self.add_argument("--verbose", action="store_true")
        self.add_argument("--host")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def format_help(self) -> str:
        described = {word for word in re.split(r"[\s,]+", _HELP) if word.startswith("-")} | {"-h"}
        others = [
            action.option_strings[0]
            for action in self._actions
            if action.option_strings and not described & set(action.option_strings)
        ]
        listed = textwrap.wrap(
            ", ".join(others), 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        return _HELP.format(others="\n".join(listed))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `syncline run` into torchrun's namespace.

    `nproc_per_node` may still be a word. `master_port` is None unless it was given. A `--` between script and
    arguments is removed.

    Raises:
        UsageError: an option is unknown, incomplete or of the wrong type, or the script is missing.
    """
    parser = _Parser()
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


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _spellings(name: str) -> list[str]:
    """Return all that torchrun takes for an option: the short name first, then with hyphens and with underscores."""
    short = [_SHORT[name]] if name in _SHORT else []
    return [*short, *dict.fromkeys([name, f"--{_dest(name)}"])]


def _is_set(dest: str) -> bool:
    text = environment.torchrun_default(dest) or "0"
    try:
        return bool(int(text))
    except ValueError:
        raise UsageError(f"PET_{dest.upper()}={text!r}: expected 0 or 1") from None


def _unknown_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the unknown options of a command line without a script, where all options must be ours."""
    known = [option for action in parser._actions for option in action.option_strings]
    words = [word.partition("=")[0] for word in argv if word.startswith("--") and word != "--"]
    return [word for word in words if not any(option.startswith(word) for option in known)]


def _about_unknown(parser: argparse.ArgumentParser, option: str) -> str:
    known = [known for action in parser._actions for known in action.option_strings]
    name = option.partition("=")[0]
    meant = name.replace("_", "-")
    near = difflib.get_close_matches(meant, known, n=1)
    if not near:  # "--nporc" is not similar to "--nproc-per-node", but similar to its beginning
        beginnings = {word[: len(meant)]: word for word in reversed(known) if word.startswith("--")}
        near = [beginnings[word] for word in difflib.get_close_matches(meant, beginnings, n=1, cutoff=0.75)]
    remedy = f"did you mean {near[0]}?" if near else "see syncline run --help"
    return f"unknown option {name}: {remedy} (options of the program follow its name)"


def _in_plain_words(message: str) -> str:
    if "training_script" in message and "required" in message:
        return "no script given: syncline run -n 2 SCRIPT [arguments]; see syncline run --help"
    return f"{message}; see syncline run --help"


class CommandParser(argparse.ArgumentParser):
    """A parser of the options of one command.

    Args:
        command: name of the command, such as "syncline bench".
        text: help of the command.
    """

    def __init__(self, command: str, text: str) -> None:
        super().__init__(prog=command, allow_abbrev=False)
        self._text = text

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        return self._text

    def parse_all(self, argv: Sequence[str], *, what: str = "argument", hint: str = "") -> argparse.Namespace:
        """Parse all arguments. Unknown arguments are an error.

        Args:
            argv: the given arguments.
            what: the word for an unknown argument in the error.
            hint: text added to the error about an unknown argument.

        Raises:
            UsageError: an argument is unknown or invalid.
        """
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise UsageError(f"unknown {what} {unknown[0]}: {remedy}{hint}")
        return args
