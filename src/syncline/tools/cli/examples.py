"""`syncline examples DIR`: the examples of the documentation, which are part of the package."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from syncline.tools.cli.options import CommandParser, UsageError

_HELP = """\
usage: syncline examples DIR

Write the example programs of the documentation into DIR: plain scripts, a notebook,
frameworks, SLURM and Kubernetes. DIR is created; files of the same names in it are
an error, and nothing is written then.

  syncline examples examples
  syncline run -n 2 examples/mnist_cnn.py

  -h, --help      show this text
"""


def main(argv: Sequence[str]) -> int:
    """Run `syncline examples` with these arguments, and return the exit code.

    Raises:
        UsageError: the arguments are invalid, or a file of the same name is in the directory.
    """
    parser = CommandParser("syncline examples", _HELP)
    parser.add_argument("directory", metavar="DIR", type=Path)
    args: argparse.Namespace = parser.parse_all(argv)
    target: Path = args.directory
    package = Path(__file__).parents[2]
    source = package / "examples"
    if not source.is_dir():  # an editable install: they are beside `src`
        source = package.parents[1] / "examples"
    names = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    names = [name for name in names if "__pycache__" not in name.parts]
    present = [str(name) for name in names if (target / name).exists()]
    if present:
        raise UsageError(f"{target} has {present[0]} already: expected a directory without the examples")
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    print(f"wrote {len(names)} files into {target}")
    return 0
