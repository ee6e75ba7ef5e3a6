"""Show which goals the figures of a folder meet, and what has changed since another measurement.

    python benchmarks/compare.py build/bench                 # the figures that have goals
    python benchmarks/compare.py build/before build/bench    # the exit status is 1 if a figure is worse beyond noise
    python benchmarks/compare.py --check build/before build/bench    # the same folders, before build/bench is measured

A folder holds what the other programs write with --json. `make bench` fills build/bench. The exit status is 2 if a
folder cannot be read, or if two folders were measured with other settings, such as another number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from baseline import Measurement, differences, read_measurement
from goals import Figure, goals_table, show_comparison
from syncline.tools.bench.results import describe_machine
from tables import processor_text

Folder = Mapping[str, Measurement]
"""The measurements of a folder, by the name of the file, in the order of the names."""


def measurements_in(folder: Path) -> Folder:
    """Return the measurements of all files of a folder.

    Raises:
        ValueError: a file cannot be read, or no file has figures.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = read_measurement(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
    if not any(one.figures for one in found.values()):
        raise ValueError(
            f"{folder}: expected a folder with files that the programs of benchmarks/ have written (--json)"
        )
    return found


def figures_of(found: Folder) -> list[Figure]:
    return [figure for one in found.values() for figure in one.figures]


def check_before(folder: Path, after: Path) -> None:
    """Check that a baseline can be compared with what is going to be measured on this machine.

    Args:
        folder: the folder of the baseline.
        after: the folder of the measurement. `make bench` deletes it first.

    Raises:
        ValueError: the baseline cannot be compared.
    """
    if folder.resolve().is_relative_to(after.resolve()):
        raise ValueError(
            f"{folder}: expected a baseline outside {after}, which is deleted before the measurement"
        )
    here = {"processor": processor_text(describe_machine())}
    for name, one in measurements_in(folder).items():
        if one.figures and (different := differences(here, one.settings)):
            raise ValueError(f"{folder / name} was measured on another machine: {different}")


def check_settings(folder: Path, before: Folder, after: Folder) -> None:
    """Check that the files of the same name were measured with the same settings.

    Raises:
        ValueError: they were not.
    """
    for name, one in after.items():
        if name not in before or not one.figures or not before[name].figures:
            continue
        if different := differences(one.settings, before[name].settings):
            raise ValueError(f"{folder / name} was measured with other settings: {different}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="only check the baseline, before the measurement"
    )
    parser.add_argument("before", type=Path, nargs="?", help="the folder of the baseline")
    parser.add_argument("after", type=Path, help="the folder of the measurement")
    arguments = parser.parse_args()
    before = arguments.before
    if arguments.check and before is None:
        parser.error("--check: expected two folders")
    try:
        if arguments.check:
            check_before(before, arguments.after)
            return 0
        old = None if before is None else measurements_in(before)
        new = measurements_in(arguments.after)
        if old is not None:
            check_settings(before, old, new)
    except ValueError as error:
        parser.error(f"{error}; make bench-baseline measures a new baseline" if before else str(error))
    print(goals_table(figures_of(new)))
    return 0 if old is None else show_comparison(before, figures_of(old), figures_of(new))


if __name__ == "__main__":
    sys.exit(main())
