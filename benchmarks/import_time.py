"""How long `import syncline` takes, against `import torch`: fresh processes that take turns.

    python benchmarks/import_time.py [--rounds N] [--quick] [--json FILE]

Times are CPU seconds of the user, so that other work on the machine disturbs them little. `import syncline` imports no
more than is asked for afterwards; so the last statement is what a training program asks for. Python writes bytecode at
the first import of a file; where it must not (PYTHONDONTWRITEBYTECODE), every import compiles the sources again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from rounds import RoundsParser

TORCH = "import torch"
STATEMENTS = (
    TORCH,
    "import syncline",
    "import torch, syncline",
    "import torch; from syncline import DistributedDataParallel, init",
)


def cpu_seconds(statement: str) -> float:
    """Return the CPU seconds that a fresh Python takes for `statement`."""
    before = os.times().children_user
    subprocess.run([sys.executable, "-c", statement], check=True)
    return os.times().children_user - before


def main() -> None:
    arguments = RoundsParser(__doc__, rounds=15, quick=1).parse_figures()
    for statement in STATEMENTS:  # brings the files into the page cache
        cpu_seconds(statement)
    rounds = [[cpu_seconds(statement) for statement in STATEMENTS] for _ in range(arguments.rounds)]
    seconds = dict(zip(STATEMENTS, map(list, zip(*rounds, strict=True)), strict=True))
    of_torch = statistics.median(seconds[TORCH])
    width = max(map(len, STATEMENTS))
    for statement in STATEMENTS:
        median = statistics.median(seconds[statement])
        print(
            f"{statement:<{width}}  {median:6.2f} s  {median - of_torch:+6.2f} s  {median / of_torch:5.2f}x"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"user_seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
