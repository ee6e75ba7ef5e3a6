"""Figures of benchmarks with their goals, and the comparison of two measurements.

A figure has one value for each round. All functions are pure, except `show_comparison`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.tools.bench.results import median_interval
from tables import table


@dataclass(frozen=True)
class Figure:
    """A figure that a benchmark has measured, such as a ratio of two times, and its goal.

    Attributes:
        name: what was measured. It is the same in each measurement.
        values: one value for each round.
        at_most: the goal of a figure that is better if it is smaller. None if it has no goal.
        at_least: the goal of a figure that is better if it is larger. None if smaller is better.
        form: how a value is shown.
    """

    name: str
    values: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None
    form: str = "{:.2f}"

    @property
    def goal_text(self) -> str:
        """The goal in words, or "-"."""
        if self.at_least is not None:
            return f"at least {self.form.format(self.at_least)}"
        return "-" if self.at_most is None else f"at most {self.form.format(self.at_most)}"


def goals_table(figures: Sequence[Figure]) -> str:
    """Format the figures that have goals as a table. Return "" if there are none."""
    rows = [
        [figure.name, figure.goal_text, _judged(figure)]
        for figure in figures
        if (figure.at_most, figure.at_least) != (None, None)
    ]
    return table([["figure", "goal", "median [95 % interval]"], *rows]) if rows else ""


def _judged(figure: Figure) -> str:
    found = median_interval(figure.values)
    return judged(found, at_most=figure.at_most, at_least=figure.at_least, form=figure.form)


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

    Examples:
        >>> judged((1.1, 1.0, 1.3), at_most=1.2), judged((1.1, 1.0, 1.2), at_most=1.2)
        ('1.10 [1.00, 1.30] met, within noise', '1.10 [1.00, 1.20] met')
        >>> judged((9.0, 8.0, 10.0), at_least=10, form="{:.0f}x"), judged((4.0, 3.0, 4.5), at_least=5)
        ('9x [8x, 10x] not met, within noise', '4.00 [3.00, 4.50] not met')
    """
    assert (at_most is None) != (at_least is None)
    answers = {one <= at_most if at_most is not None else one >= (at_least or 0) for one in found[1:]}
    is_met = found[0] <= at_most if at_most is not None else found[0] >= (at_least or 0)
    noise = ", within noise" if len(answers) > 1 else ""
    return f"{_with_interval(found, form)} {'met' if is_met else 'not met'}{noise}"


def _with_interval(found: tuple[float, float, float], form: str) -> str:
    middle, low, high = (form.format(one) for one in found)
    return f"{middle} [{low}, {high}]"


# ---------------------------------------------------------------------- two measurements


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return the figures as plain data, which `from_json` reads."""
    return [{**asdict(figure), "values": list(figure.values)} for figure in figures]


def from_json(data: object) -> list[Figure]:
    """Return the figures of a measurement from the contents of its file.

    Raises:
        ValueError: the data has no figures.
    """
    found = data.get("figures") if isinstance(data, dict) else None
    try:
        return [_checked(Figure(**row)) for row in found or ()]
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ValueError(f"expected the figures of a benchmark: {error}") from None


def _checked(figure: Figure) -> Figure:
    """Return the figure if a comparison can show it."""
    if not isinstance(figure.name, str):
        raise TypeError(f"expected a name, got {figure.name!r}")
    if not isinstance(figure.values, list) or not figure.values:
        raise TypeError(f"{figure.name}: expected a list with a value for each round, got {figure.values!r}")
    for value in (*figure.values, figure.at_most or 0, figure.at_least or 0):
        # A value that is not a number, or a form that shows none, is an error here.
        figure.form.format(value + 0.0)
    return figure


def show_comparison(path: Path, before: Sequence[Figure], after: Sequence[Figure]) -> int:
    """Print what has changed since another measurement. Return an exit status: 1 if a figure is worse, else 0.

    Args:
        path: where the baseline is.
        before: the figures of the baseline.
        after: the figures of the new measurement.
    """
    text, worse = compared(before, after)
    print(f"\nCompared with {path}: median [95 % interval]\n{text}")
    if worse:
        print(f"worse by more than noise: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


def compared(before: Sequence[Figure], after: Sequence[Figure]) -> tuple[str, list[str]]:
    """Compare two measurements.

    A figure is worse if it is worse by the medians, and the intervals do not overlap.

    Args:
        before: the figures of the baseline.
        after: the figures of the new measurement.

    Returns:
        A table, and the names of the figures that are worse.

    Examples:
        >>> text, worse = compared([Figure("a", [1.0, 1.1, 1.0])], [Figure("a", [1.3, 1.4, 1.3])])
        >>> print(text)
        figure             before              after
        a       1.00 [1.00, 1.10]  1.30 [1.30, 1.40]  1.30 times  worse
        >>> worse
        ['a']
    """
    old = {figure.name: figure for figure in before}
    rows = [["figure", "before", "after", "", ""]]
    worse = []
    for new in after:
        if new.name not in old:
            rows.append([new.name, "-", _with_interval(median_interval(new.values), new.form), "", "new"])
            continue
        verdict = _verdict(old[new.name], new)
        if verdict == "worse":
            worse.append(new.name)
        rows.append([new.name, *_before_and_after(old.pop(new.name), new), verdict])
    rows += [[name, "", "-", "", "not measured"] for name in old if name not in {one.name for one in after}]
    return table(rows), worse


def _before_and_after(old: Figure, new: Figure) -> list[str]:
    texts = [_with_interval(median_interval(figure.values), figure.form) for figure in (old, new)]
    before, after = (statistics.median(figure.values) for figure in (old, new))
    is_ratio = "%" not in new.form and before > 0
    return [*texts, f"{after / before:.2f} times" if is_ratio else f"{after - before:+.1f}"]


def _verdict(old: Figure, new: Figure) -> str:
    _, old_low, old_high = median_interval(old.values)
    _, new_low, new_high = median_interval(new.values)
    if new_low <= old_high and old_low <= new_high:
        return ""
    has_grown = new_low > old_high
    return "worse" if has_grown == (new.at_least is None) else "better"
