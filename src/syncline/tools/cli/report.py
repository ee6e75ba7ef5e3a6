"""`syncline report`, `syncline compare` and `syncline watch`: what traces say about a run, about two, or about now.

None of them imports torch, which takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from syncline.tools.cli.options import CommandParser, UsageError, explained, refuse
from syncline.tools.cli.output import write_file
from syncline.tools.cli.values import trace_folder
from syncline.tools.plan.machine import UNMEASURED, Machine, load_machine
from syncline.tools.report.chrome import chrome_trace
from syncline.tools.report.document import document_of
from syncline.tools.report.load import NoTrace, load
from syncline.tools.report.page import page
from syncline.tools.report.run import Run, run_of
from syncline.tools.report.text import compared, text_of
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, screen
from syncline.tracing.file import parts_in
from syncline.words import MAX_COLUMNS, format_count, wrapped

_REPORT_HELP = """\
usage: syncline report DIR [--out FILE] [--format html|text|json|chrome]

Say where the time of a training step goes: which rank and which bucket the others
wait for, what to do about it, and the picture of a step. DIR is the directory of a
trace, as syncline run --trace DIR and sl.trace(DIR) write it. The program may still
run, or may have been killed.

  syncline report runs/1                      writes runs/1/report.html
  syncline report runs/1 --format text        prints the same in words
  syncline report runs/1 --format json        all figures, for other programs
  syncline report runs/1 --format chrome      files for Perfetto (ui.perfetto.dev)
                                              and Holistic Trace Analysis

  --out FILE            write the report to FILE (default: DIR/report.html for html;
                        text and json are printed; chrome needs a folder, default:
                        DIR/chrome, with one file for each rank)
  --format FORMAT       html (default), text, json or chrome
  -h, --help            show this text

Exit code: 0; 2 for wrong usage, or if DIR has no trace.
"""

_COMPARE_HELP = """\
usage: syncline compare DIR DIR

Put two traced runs side by side: what takes longer, by how much, and why.

  syncline compare runs/before runs/after

  -h, --help            show this text
"""

_WATCH_HELP = """\
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
"""The interval at which the picture is shown."""

_CLEAR = "\033[H\033[2J"


def report(argv: Sequence[str]) -> int:
    """Run `syncline report` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid, or there is no trace.
    """
    parser = CommandParser("syncline report", _REPORT_HELP)
    parser.add_argument("directory", metavar="DIR", type=trace_folder)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--format", choices=("html", "text", "json", "chrome"), default="html")
    args = parser.parse_all(argv)
    directory: Path = args.directory
    run = run_in(directory)
    if args.format == "chrome":
        return _write_chrome(run, directory, args.out)
    document = document_of(run, machine_here())
    if args.format == "html":
        found = page(document)
    else:
        found = text_of(document) if args.format == "text" else json.dumps(document, indent=1)
    if args.out is None and args.format != "html":
        print(found)
        return 0
    path = args.out or directory / "report.html"
    write_file(path, found.rstrip("\n") + "\n", option="--out", follows_link=args.out is not None)
    for one in document["findings"][:3]:
        print("\n".join(wrapped(one["headline"])))
    _print_path("The whole report is in", path)
    return 0


def compare(argv: Sequence[str]) -> int:
    """Run `syncline compare` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid, or there is no trace.
    """
    parser = CommandParser("syncline compare", _COMPARE_HELP)
    for name in ("first", "second"):
        parser.add_argument(name, metavar="DIR", type=trace_folder)
    args = parser.parse_all(argv)
    documents = [document_of(run_in(one), machine_here()) for one in (args.first, args.second)]
    print(compared([str(args.first), str(args.second)], documents))
    return 0


def watch(argv: Sequence[str]) -> int:
    """Run `syncline watch` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid.
    """
    parser = CommandParser("syncline watch", _WATCH_HELP)
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


def run_in(directory: Path) -> Run:
    """Return the run whose trace is in a directory.

    Raises:
        UsageError: there is no trace.
    """
    with explained(NoTrace):
        return run_of(load(directory))


def machine_here() -> Machine:
    """Return the figures of this machine. A command that looks at a run does not fail because of them."""
    try:
        return load_machine()
    except (OSError, ValueError):
        return UNMEASURED


def _write_chrome(run: Run, directory: Path, out: Path | None) -> int:
    folder = out or directory / "chrome"
    is_link = out is None and folder.is_symlink()
    refuse(is_link, f"cannot write into {folder}: it is a link: name a folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {rank for ranks in run.steps.values() for rank in ranks}
    for rank in ranks:
        text = json.dumps(chrome_trace(run, rank))
        write_file(folder / f"rank-{rank}.json", text, option="--out", follows_link=out is not None)
    _print_path(f"Open the traces of {format_count(len(ranks), 'rank')} in https://ui.perfetto.dev:", folder)
    return 0


def _print_path(text: str, path: Path) -> None:
    """Print a sentence that ends with a path. A long path has a line of its own, and is not divided."""
    print(text, path, sep=" " if len(f"{text} {path}") <= MAX_COLUMNS else "\n")
