"""The arguments that the programs in benchmarks/ have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["RoundsParser"]


class RoundsParser(argparse.ArgumentParser):
    """--rounds, --quick and --json; a program adds its own.

    What it gives has `rounds`, which is `quick` where that was asked for, `quick` and `json`.

    Args:
        about: the program's docstring, of which the first line is shown.
        rounds: as a rule.
        quick: as many to see whether it runs.

    Example:
        >>> parser = RoundsParser("What it costs.", rounds=40, quick=3)
        >>> parser.parse_figures([]).rounds, parser.parse_figures(["--quick"]).rounds
        (40, 3)
    """

    def __init__(self, about: str | None, *, rounds: int, quick: int) -> None:
        super().__init__(description=about.splitlines()[0] if about else None)
        self._num_quick = quick
        self.add_argument("--rounds", type=int, default=rounds)
        self.add_argument(
            "--quick", action="store_true", help=f"{quick} short rounds: figures without meaning"
        )
        self.add_argument("--json", type=Path, help="where to write the figures")

    def parse_figures(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """As `parse_args`."""
        arguments = self.parse_args(argv)
        if arguments.quick:
            arguments.rounds = self._num_quick
        return arguments
