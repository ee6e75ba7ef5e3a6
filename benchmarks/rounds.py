"""The parts that the programs of this folder share: a parser of arguments, competitors that take turns, and goals.

The figures are those of `syncline.tools.bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from syncline import World
from syncline.session import transport_of
from syncline.tools.bench.timing import alternate, timer

__all__ = ["RoundsParser", "judged", "take_turns"]


class RoundsParser(argparse.ArgumentParser):
    """A parser with --rounds, --quick and --json; a program adds its own arguments.

    The parsed arguments have `rounds`, `quick` and `json`. With --quick, `rounds` is the constructor's `quick`.

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
        self._num_quick = quick
        self.add_argument("--rounds", type=int, default=rounds)
        self.add_argument(
            "--quick", action="store_true", help=f"{quick} short rounds: figures without meaning"
        )
        self.add_argument("--json", type=Path, help="where to write the figures")

    def parse_figures(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments as `parse_args` does, and apply --quick."""
        arguments = self.parse_args(argv)
        if arguments.quick:
            arguments.rounds = self._num_quick
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


def judged(
    found: tuple[float, float, float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    form: str = "{:.2f}",
) -> str:
    """Format a measured number with its interval, and say whether the median meets its goal.

    "within noise" means that one end of the interval meets the goal and the other does not.

    Args:
        found: the median and its interval.
        at_most: the upper bound that is the goal; give this or `at_least`.
        at_least: the lower bound that is the goal.
        form: the format of each figure.

    Example:
        >>> judged((1.1, 1.0, 1.3), at_most=1.2), judged((1.1, 1.0, 1.2), at_most=1.2)
        ('1.10 [1.00, 1.30] met, within noise', '1.10 [1.00, 1.20] met')
        >>> judged((9.0, 8.0, 10.0), at_least=10, form="{:.0f}x"), judged((4.0, 3.0, 4.5), at_least=5)
        ('9x [8x, 10x] not met, within noise', '4.00 [3.00, 4.50] not met')
    """
    assert (at_most is None) != (at_least is None)
    answers = {one <= at_most if at_most is not None else one >= (at_least or 0) for one in found[1:]}
    middle, low, high = found
    is_met = middle <= at_most if at_most is not None else middle >= (at_least or 0)
    noise = ", within noise" if len(answers) > 1 else ""
    return f"{form.format(middle)} [{form.format(low)}, {form.format(high)}] {'met' if is_met else 'not met'}{noise}"
