"""Show which goals the figures of a folder meet, and what has changed since another measurement.

    python benchmarks/compare.py build/bench                 # the figures that have goals
    python benchmarks/compare.py build/before build/bench    # the exit status is 1 if a figure is worse beyond noise

A folder holds what the other programs write with --json. `make bench` fills build/bench.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from syncline.tools.bench.goals import Figure, from_json, goals_table, show_comparison


def figures_in(folder: Path) -> list[Figure]:
    """The figures of all files of a folder, in the order of the files' names."""
    try:
        found = [
            figure
            for path in sorted(folder.glob("*.json"))
            for figure in from_json(json.loads(path.read_text()))
        ]
    except ValueError as error:
        sys.exit(f"{folder}: {error}")
    if not found:
        sys.exit(
            f"{folder}: expected a folder with files that the programs of benchmarks/ have written (--json)"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path, nargs="?", help="the folder of the baseline")
    parser.add_argument("after", type=Path, help="the folder of the measurement")
    arguments = parser.parse_args()
    after = figures_in(arguments.after)
    print(goals_table(after))
    if arguments.before is None:
        return 0
    return show_comparison(arguments.before, figures_in(arguments.before), after)


if __name__ == "__main__":
    sys.exit(main())
