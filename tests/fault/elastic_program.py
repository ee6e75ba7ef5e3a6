"""A rank of `elastic`, as a program that a launcher starts: FOLDER, and the plan as JSON.

The program waits at chosen places until the test lets it go on: then the ranks are in a known place when a host is
lost, or the cable between two hosts is pulled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # where a launcher starts this program, only its own folder is there
    sys.path.append(str(Path(__file__).parents[1]))

import elastic

__all__ = ["command"]


def command(folder: Path, plan: elastic.Plan) -> list[str]:
    """The program and its arguments."""
    settings = {**vars(plan), "faults": [vars(fault) for fault in plan.faults]}
    return [__file__, str(folder), json.dumps(settings)]


def main(folder: Path, settings: dict[str, object]) -> None:
    faults = [elastic.Fault(**fault) for fault in settings.pop("faults")]  # type: ignore[attr-defined]
    plan = elastic.Plan(**settings, faults=tuple(faults))  # type: ignore[arg-type]
    first = int(os.environ["RANK"])
    with (folder / f"{first}").open("a") as file:
        elastic.train_or_leave(plan, first, folder, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
