"""The parser class of all commands, and the options of `syncline run`.

`syncline run` accepts torchrun's options. They are listed here, and not taken from torch's parser, so that help texts
and errors appear without an import of torch, which takes seconds. `tests/launch/test_run.py` compares this list with
torch's parser.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from syncline import environment
from syncline.tools.cli.values import FOLDER, NNODES, PROCESSES, START_METHOD, STREAMS, integer, number

_HELP = """\
usage: syncline run [-n N] [options] SCRIPT [arguments]
       syncline run [-n N] [options] -m MODULE [arguments]

Start a program on N processes of this host, and wait until they end. Several
hosts may take part. Each process finds its rank in the environment, where
sl.init() reads it. Every line of output begins with the rank that printed it.
If a process fails, the others are ended, and the traceback of the first
failure is printed last.

  syncline run -n 2 train.py --epochs 2       --epochs is an option of train.py
  syncline run -n gpu -m package.train        one process for each GPU
  syncline run -n 8 --nnodes 2 --node-rank 0 --master-addr HOST \\
      --master-port 29500 train.py            on the second host: --node-rank 1

processes
  -n, --nproc-per-node N   number of processes on this host, or auto, cpu or gpu
                           (default: 1)
  -m, --module             SCRIPT is a module, as in python -m
  --no-python              SCRIPT is a command, which is run without python
  --max-restarts N         if a process fails, start all processes again, at most
                           N times (default: 0)
  --resilient              if a process is lost in sl.steps, the others train on;
                           --max-restarts then starts only this process again
  --shutdown-timeout SEC   how long processes may continue after Ctrl-C (default:
                           5), or after SIGTERM, when they may save (default: 30)

hosts
  --nnodes N               number of hosts, or MIN:MAX (default: 1)
  --node-rank I            number of this host, from 0
  --master-addr HOST       the host of rank 0
  --master-port PORT       a free port of that host (default on one host: any)
  --host ADDRESS           the address at which this host listens for the others
                           (default: the loopback on one host; every interface
                           with several hosts, see "Security" in the documentation)
  --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf, --standalone,
  --local-addr             other kinds of rendezvous, as in torchrun

output
  --trace DIR              record every step in DIR, for syncline report DIR
  --live                   show below the output, in a terminal, what each rank of
                           this host is doing, and where it is if the run hangs
  --log-dir DIR            keep the output of each process in DIR
  --log-line-prefix-template TEXT
                           text before each line ('' for none); ${rank},
                           ${local_rank}, ${role_name}, ${hostname} are replaced
  --tee, --redirects, --local-ranks-filter
                           torchrun's own log files and filters
  --verbose                also show the log lines of torch's launcher

These options of torchrun are accepted, too:
  --monitor-interval, --start-method, --event-log-handler, --role,
  --duplicate-stdout-filters, --duplicate-stderr-filters, --logs-specs,
  --numa-binding, --signals-to-handle, --run-path, --virtual-local-rank

Ctrl-C and SIGTERM are sent to all processes. A second signal kills them, but
SIGTERMs within 2 seconds count as one. SIGUSR1 is sent to them as well, and has
no other effect. With --resilient, a process that is lost in sl.steps is no
failure, whether by a signal or by an exception. The exit code is that of the
process that failed first; 75 if all processes stopped because they were asked
to (see sl.Checkpointer.stop_if_asked; they are not started again); 128 + number
after another end by a signal; 2 for wrong usage.
"""


def _comma_separated_list(text: str) -> list[str]:
    """Split `text` at its single commas. Two commas in a row stand for a comma inside an item."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


_VALUES: dict[str, tuple[Callable[[str], Any], Any]] = {
    "--nnodes": (NNODES, "1:1"),
    "--nproc-per-node": (PROCESSES, "1"),
    "--rdzv-backend": (str, "static"),
    "--rdzv-endpoint": (str, ""),
    "--rdzv-id": (str, "none"),
    "--rdzv-conf": (str, ""),
    "--max-restarts": (integer("a number of restarts", 0, 1_000_000), 0),
    "--monitor-interval": (number(float, "a number of seconds from 0 to 3,600", 0, 3600), 0.1),
    "--start-method": (START_METHOD, "spawn"),
    "--event-log-handler": (str, "null"),
    "--role": (str, "default"),
    "--log-dir": (FOLDER, None),
    "--redirects": (STREAMS, "0"),
    "--tee": (STREAMS, "0"),
    "--log-line-prefix-template": (str, None),  # torchrun has it from torch 2.15 on, `syncline run` always
    "--local-ranks-filter": (str, ""),
    "--duplicate-stdout-filters": (_comma_separated_list, []),
    "--duplicate-stderr-filters": (_comma_separated_list, []),
    "--node-rank": (integer("the number of a host", 0, 1_000_000), 0),
    "--master-addr": (str, "127.0.0.1"),
    "--master-port": (integer("a port", 1, 65535), None),
    "--local-addr": (str, None),
    "--logs-specs": (str, None),
    "--numa-binding": (str, None),
    "--signals-to-handle": (str, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    "--shutdown-timeout": (integer("a number of seconds", 0, 1_000_000), None),
}
"""The type and default of each option of torchrun that has a value.

`--print-completion` (torch 2.15) is left out, because it only prints the shell completion of the command `torchrun`.
"""

_FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")

_SHORT = {"--nproc-per-node": ["-n"], "--module": ["-m"], "--redirects": ["-r"], "--tee": ["-t"]}

_WITHOUT_VARIABLE = ("--logs-specs", "--numa-binding")
"""The options that cannot be set by environment variables.

For each other option, torchrun has an environment variable with which the user can change the default.
"""


class UsageError(Exception):
    """An error in a command line. Its text says what is wrong and what to do."""


def refuse(is_wrong: object, text: str) -> None:
    """Raise an error with this text if a command line is wrong.

    Raises:
        UsageError: it is wrong.
    """
    if is_wrong:
        raise UsageError(text)


@contextmanager
def explained(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Raise `UsageError` instead of an exception of these classes. Its text has `before` before that of the exception.

    Raises:
        UsageError: the block has raised such an exception.
    """
    try:
        yield
    except kinds as error:
        raise UsageError(f"{before}{error}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, which proposes the most similar known name, or "".

    Examples:
        >>> did_you_mean("--nporc", ["--nproc-per-node"]), did_you_mean("--x", ["--json", "-h"])
        (': did you mean --nproc-per-node?', '')
    """
    word, words = name.lstrip("-"), {one.lstrip("-"): one for one in known}  # hyphens make no names similar
    if len(word) > 2:  # it may be abbreviated; of fewer letters, many names have some
        words = {text[: len(word)]: one for text, one in words.items()} | words
    near = difflib.get_close_matches(word, words, n=1)
    return f": did you mean {words[near[0]]}?" if near else ""


class CommandParser(argparse.ArgumentParser):
    """A parser for the arguments of one command. It raises `UsageError` where argparse would exit.

    Args:
        command: the name of the command, such as "syncline bench".
        text: the help text of the command.
        has_program: whether a program and its own arguments can follow the options.
        allow_abbrev: whether the parser accepts abbreviated options.
    """

    def __init__(self, command: str, text: str, *, has_program: bool = False, allow_abbrev: bool = False):
        super().__init__(prog=command, allow_abbrev=allow_abbrev)
        self._text = text
        self._has_program = has_program
        if has_program:
            self.add_argument("training_script", nargs="?")
            self.add_argument("training_script_args", nargs=argparse.REMAINDER, default=[])

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        return self._text

    def _parse_optional(self, arg_string: str) -> Any:
        """Parse an option. As torchrun does, accept underscores instead of hyphens in its name."""
        name, equals, value = arg_string.partition("=")
        hyphens = name.replace("_", "-") if name.startswith("--") else name
        return super()._parse_optional(hyphens + equals + value)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments of the command. If `--` stands between a program and its arguments, remove it.

        Raises:
            UsageError: an argument is unknown or invalid.
        """
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            near = did_you_mean(name.replace("_", "-"), known) or f": see {self.prog} --help"
            after = " (options of your program must come after its name)" if self._has_program else ""
            kind = "option" if name.startswith("-") else "argument"
            raise UsageError(f"unknown {kind} {name}{near}{after}")
        if self._has_program and args.training_script_args[:1] == ["--"]:
            del args.training_script_args[0]
        return args


def parse_run(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `syncline run`.

    Returns:
        A namespace with the same attributes as torchrun's. `nproc_per_node` is a text, which can be a word such as
        "gpu". `master_port` is None if the option is absent.

    Raises:
        UsageError: an option is unknown, incomplete or of the wrong type, or the script is missing.
    """
    parser = CommandParser("syncline run", _HELP, has_program=True, allow_abbrev=True)
    for name, (kind, default) in _VALUES.items():
        variable = None if name in _WITHOUT_VARIABLE else environment.torchrun_default(_dest(name))
        chosen = default if variable is None else variable
        parser.add_argument(*_SHORT.get(name, []), name, type=kind, default=chosen)
    for name in _FLAGS:
        text = environment.torchrun_default(_dest(name)) or "0"
        is_set = {"0": False, "1": True}.get(text)
        refuse(is_set is None, f"PET_{_dest(name).upper()}={text!r}: expected 0 or 1, or an unset variable")
        parser.add_argument(*_SHORT.get(name, []), name, action="store_true", default=is_set)
    for name in ("--verbose", "--resilient", "--live"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--trace", type=FOLDER)
    args = parser.parse_all(argv)
    refuse(args.training_script is None, "expected a script: syncline run -n 2 SCRIPT [arguments]")
    return args


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
