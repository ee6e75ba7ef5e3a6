"""The parts that the programs of this folder share: a parser of arguments, competitors that take turns, and goals."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from goals import Figure, judged, to_json
from syncline import World
from syncline.session import transport_of
from syncline.tools.bench.results import describe_machine
from syncline.tools.bench.timing import alternate, timer
from tables import processor_text

__all__ = [
    "LOCAL",
    "Figure",
    "RoundsParser",
    "exponent",
    "judged",
    "settings_of",
    "take_turns",
    "write_figures",
]


LOCAL = "not synchronized"
"""The name of the competitor that trains alone."""


class RoundsParser(argparse.ArgumentParser):
    """A parser with --rounds, --quick and --json; a program adds its own arguments.

    The parsed arguments have `rounds`, `quick` and `json`. With --quick, the default of `rounds` is the constructor's
    `quick`.

    Args:
        about: the program's docstring; its first line is shown.
        rounds: the default number of rounds.
        quick: the number of rounds for a check that the program runs.

    Example:
        >>> parser = RoundsParser("What it costs.", rounds=40, quick=3)
        >>> parser.parse_figures([]).rounds, parser.parse_figures(["--quick"]).rounds
        (40, 3)
    """

    def __init__(self, about: str | None, *, rounds: int, quick: int) -> None:
        super().__init__(description=about.splitlines()[0] if about else None)
        self._num_rounds, self._num_quick = rounds, quick
        self.add_argument("--rounds", type=int)
        self.add_argument(
            "--quick", action="store_true", help=f"{quick} short rounds: figures without meaning"
        )
        self.add_argument("--json", type=Path, help="where to write the figures")

    def parse_figures(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments as `parse_args` does, and apply --quick."""
        arguments = self.parse_args(argv)
        if arguments.rounds is None:
            arguments.rounds = self._num_quick if arguments.quick else self._num_rounds
        return arguments


def take_turns(
    steps: Mapping[str, Callable[[], object]], *, num_rounds: int, num_steps: int, world: World
) -> dict[str, list[float]]:
    """Return the seconds per step on the slowest rank, by competitor and round.

    Args:
        steps: functions that make one step of each competitor, the same ones on all ranks.
        num_rounds: rounds that count; two more run before them as a warm-up.
        num_steps: steps of one competitor in one round.
        world: the ranks.
    """
    transport = transport_of(None)
    assert transport.size == world.size
    timers = {name: timer(step, transport) for name, step in steps.items()}
    num_calls = dict.fromkeys(timers, num_steps)
    return alternate(timers, num_rounds=num_rounds, num_calls=num_calls, transport=transport)


def exponent(values: Mapping[int, float]) -> float:
    """Return the exponent of the power law that fits values by number best: the slope of a line through the logarithms.

    Values that are not above 0 do not count. The result is NaN if fewer than two are left.

    Example:
        >>> round(exponent({10: 1.0, 100: 10.0, 1000: 100.0}), 3)
        1.0
    """
    points = [(math.log(number), math.log(value)) for number, value in values.items() if value > 0]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else math.nan


def settings_of(world: World) -> dict[str, object]:
    """Return the settings that the ranks of this job have in common."""
    return {"ranks": world.size, "transport": transport_of(None).name}


def write_figures(
    arguments: argparse.Namespace,
    figures: Sequence[Figure],
    settings: Mapping[str, object],
    /,
    **more: object,
) -> None:
    """Write figures, and whatever else is to be kept, to the file of --json, which `compare.py` reads.

    Without --json, do nothing.

    Args:
        arguments: the arguments of the program. They are settings of the measurement, unless they have no influence on
            a comparison.
        figures: the figures.
        settings: other settings with which the figures were measured.
        more: more contents of the file.
    """
    path: Path | None = arguments.json
    if path is None:
        return
    given = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in _WITHOUT_INFLUENCE
    }
    kept = {"processor": processor_text(describe_machine()), **given, **settings}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": to_json(figures), "settings": kept, **more}, indent=1) + "\n")


_WITHOUT_INFLUENCE = ("json", "rounds", "timeout", "mpi_venvs")
