"""`syncline watch`: show what each rank of a traced run is doing, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from syncline.tools.cli.options import CommandParser, UsageError
from syncline.tools.cli.values import trace_folder
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, screen
from syncline.tracing.file import parts_in

_HELP = """\
usage: syncline watch DIR [--once]

Show what each rank of a run is doing now: its step, how long a step takes, how much
of it the rank waits, and its phase. If the run stands still: where each rank is, in
words, and which rank the others wait for. DIR is the directory of a trace, as
syncline run --trace DIR and sl.trace(DIR) write it; start this in another terminal.

  syncline watch runs/1

  --once                print the present state, and end; there must be a trace
  -h, --help            show this text

The command ends when all ranks have ended, or with Ctrl-C.
"""

_EVERY_SECONDS = 1.0
"""How often the picture is shown."""

_CLEAR = "\033[H\033[2J"


def main(argv: Sequence[str]) -> int:
    """Run `syncline watch` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid.
    """
    parser = CommandParser("syncline watch", _HELP)
    parser.add_argument("directory", metavar="DIR", type=trace_folder)
    parser.add_argument("--once", action="store_true")
    args = parser.parse_all(argv)
    directory: Path = args.directory
    if args.once and not parts_in(directory):
        what = "has no trace" if directory.exists() else "does not exist"
        wait = "without --once, syncline watch waits for one"
        raise UsageError(f"{directory} {what}: expected the directory of a trace; {wait}")
    follower = Follower(directory)
    try:
        while True:
            states = follower.present()
            _show(directory, states)
            if args.once or (states and all(one.end is not None for one in states)):
                return 0
            time.sleep(_EVERY_SECONDS)
    except KeyboardInterrupt:
        return 0


def _show(directory: Path, states: Sequence[RankState]) -> None:
    text = screen(states, time.monotonic()) if states else f"waiting for a trace in {directory} ..."
    print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)
