"""Loss against bytes, as tables and pictures, and the bandwidth below which sending fewer bytes pays.

Pure, except for the picture, which matplotlib draws.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import table

# ---------------------------------------------------------------------- loss against bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one setting at one learning rate, over all seeds."""

    setting: str
    learning_rate: float
    num_seeds: int
    loss: float
    """Mean over seeds, in nats."""
    loss_spread: float
    """Standard deviation over seeds; 0 if there is only one."""
    above: float
    """Difference to the loss of the bar, in nats; NaN if there is no bar."""
    above_spread: float
    """Standard deviation of that difference over the seeds that both have; 0 if there is only one."""
    sent_bytes: float
    """Bytes sent by one rank in a run; mean over seeds."""
    times_fewer: float
    """Bytes that the bar sends, divided by `sent_bytes`."""
    accuracy: float | None
    """Mean over seeds; None if the task has no accuracy."""
    seconds: float


def frontier(runs: Sequence[Mapping[str, Any]], *, bar: str) -> list[Row]:
    """Return one row per setting and learning rate, in the order of their first runs.

    The bar is the setting of that name, at the learning rate with its lowest loss. Differences to it are computed per
    seed if both have runs with the same seeds, otherwise between the means.

    Args:
        runs: "setting", "learning_rate", "seed", "loss", "sent_bytes", "seconds" and, for some tasks, "accuracy".
        bar: the setting with which all are compared.

    Example:
        >>> run = {"setting": "every-step", "learning_rate": 0.1, "seed": 0, "loss": 1.5, "sent_bytes": 80}
        >>> run |= {"seconds": 1}
        >>> other = run | {"setting": "local-8", "loss": 1.75, "sent_bytes": 10}
        >>> [(row.setting, row.above, row.times_fewer) for row in frontier([run, other], bar="every-step")]
        [('every-step', 0.0, 1.0), ('local-8', 0.25, 8.0)]
    """
    groups: dict[tuple[str, float], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["setting"], run["learning_rate"]), {})[run["seed"]] = run
    bars = [by_seed for (setting, _), by_seed in groups.items() if setting == bar]
    best = min(bars, key=_mean_loss, default=None)
    return [_row(setting, rate, by_seed, best) for (setting, rate), by_seed in groups.items()]


def _mean_loss(by_seed: Mapping[int, Mapping[str, Any]]) -> float:
    mean = statistics.fmean(run["loss"] for run in by_seed.values())
    return mean if math.isfinite(mean) else math.inf


def _row(
    setting: str,
    rate: float,
    by_seed: Mapping[int, Mapping[str, Any]],
    best: Mapping[int, Mapping[str, Any]] | None,
) -> Row:
    runs = list(by_seed.values())
    losses = [run["loss"] for run in runs]
    sent = statistics.fmean(run["sent_bytes"] for run in runs)
    accuracies = [run["accuracy"] for run in runs if run.get("accuracy") is not None]
    above, times_fewer = [math.nan], math.nan
    if best is not None:
        common = [seed for seed in by_seed if seed in best]
        above = [by_seed[seed]["loss"] - best[seed]["loss"] for seed in common]
        above = above or [statistics.fmean(losses) - _mean_loss(best)]
        bar_sent = statistics.fmean(run["sent_bytes"] for run in best.values())
        times_fewer = bar_sent / sent if sent else math.inf
    return Row(
        setting=setting,
        learning_rate=rate,
        num_seeds=len(runs),
        loss=statistics.fmean(losses),
        loss_spread=_spread(losses),
        above=statistics.fmean(above),
        above_spread=_spread(above),
        sent_bytes=sent,
        times_fewer=times_fewer,
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        seconds=statistics.fmean(run["seconds"] for run in runs),
    )


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def frontier_table(rows: Sequence[Row], *, bar: str) -> str:
    """Format the rows as a table, one line per row.

    Example:
        >>> run = {"setting": "every-step", "learning_rate": 0.1, "seed": 0, "loss": 1.5, "sent_bytes": 8e6}
        >>> run |= {"seconds": 1}
        >>> print(frontier_table(frontier([run], bar="every-step"), bar="every-step"))
        setting      lr  loss, nats  above every-step  sent a rank, MB  times fewer  seconds
        every-step  0.1      1.5000           +0.0000             8.00         1.0x        1
    """
    header = ["setting", "lr", "loss, nats", f"above {bar}", "sent a rank, MB", "times fewer", "seconds"]
    has_accuracy = any(row.accuracy is not None for row in rows)
    if has_accuracy:
        header.insert(3, "accuracy")
    lines = [header]
    for row in rows:
        cells = [
            row.setting,
            f"{row.learning_rate:g}",
            interval_text(f"{row.loss:.4f}", row.loss_spread, row.num_seeds),
            interval_text(f"{row.above:+.4f}", row.above_spread, row.num_seeds),
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.times_fewer:.1f}x",
            f"{row.seconds:.0f}",
        ]
        if has_accuracy:
            cells.insert(3, "-" if row.accuracy is None else f"{row.accuracy:.2%}")
        lines.append(cells)
    return table(lines)


def interval_text(mean: str, spread: float, num_seeds: int) -> str:
    """Format a mean, with its spread if there are several seeds.

    Example:
        >>> interval_text("1.50", 0.0, 1), interval_text("1.50", 0.012, 3)
        ('1.50', '1.50 +- 0.0120')
    """
    return mean if num_seeds < 2 else f"{mean} +- {spread:.4f}"


# ---------------------------------------------------------------------- time on a link


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The speed at which one way of training reaches a loss."""

    num_steps: float
    """Number of steps until the loss is reached."""
    compute_seconds: float
    """Time of a step if the link costs nothing."""
    link_bytes: float
    """Bytes that a step sends over the link in each direction; mean over steps."""

    def seconds(self, bits_per_second: float) -> float:
        """Return the time to the loss over a link of this bandwidth: `num_steps * (compute + bytes * 8 / bandwidth)`.

        This assumes no overlap and no latency of messages. Overlap with a backward shortens the time.

        Example:
            >>> Pace(num_steps=100, compute_seconds=0.5, link_bytes=1e6).seconds(16e6)
            100.0
        """
        return self.num_steps * (self.compute_seconds + self.link_bytes * 8 / bits_per_second)


def crossover(ours: Pace, theirs: Pace) -> float:
    """Return the bandwidth in bits per second below which `ours` reaches the loss first.

    Returns:
        Infinity if ours is first over any link, 0 if it never is.

    Example:
        >>> local = Pace(num_steps=200, compute_seconds=0.1, link_bytes=1e6)
        >>> each = Pace(num_steps=100, compute_seconds=0.1, link_bytes=20e6)
        >>> round(crossover(local, each) / 1e6), local.seconds(1440e6) == each.seconds(1440e6)
        (1440, True)
        >>> crossover(each, local), crossover(local, local)
        (0.0, 0.0)
    """
    saved_bits = 8 * (theirs.num_steps * theirs.link_bytes - ours.num_steps * ours.link_bytes)
    lost_seconds = ours.num_steps * ours.compute_seconds - theirs.num_steps * theirs.compute_seconds
    if (
        saved_bits <= 0
    ):  # if ours sends more, it may still be faster above some bandwidth, but it does not pay on slow links
        return math.inf if saved_bits == 0 and lost_seconds < 0 else 0.0
    return saved_bits / lost_seconds if lost_seconds > 0 else math.inf


def rate_text(bits_per_second: float) -> str:
    """Format a bandwidth.

    Example:
        >>> rate_text(1.44e9), rate_text(25e6), rate_text(math.inf), rate_text(0.0)
        ('1.4 Gbit/s', '25 Mbit/s', 'any', 'never')
    """
    if bits_per_second == 0:
        return "never"
    if math.isinf(bits_per_second):
        return "any"
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.2g} Gbit/s"
    return f"{bits_per_second / 1e6:.3g} Mbit/s"


# ---------------------------------------------------------------------- the picture


def plot_frontier(rows: Sequence[Row], path: Path, *, bar: str) -> None:
    """Draw loss above the bar against the factor by which fewer bytes are sent.

    Args:
        rows: the result of `frontier`.
        path: the file to write; its suffix is one of `SUFFIXES`.
        bar: the setting with which the rows were compared.
    """
    importlib.import_module("matplotlib").use("agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for row in rows:
        panel.errorbar(row.times_fewer, row.above, yerr=row.above_spread, marker="o", capsize=3)
        panel.annotate(
            row.setting, (row.times_fewer, row.above), (5, 4), textcoords="offset points", fontsize="small"
        )
    panel.axhline(0, color="tab:gray", linewidth=0.8)
    panel.set(xscale="log", xlabel=f"times fewer bytes than {bar}", ylabel=f"nats above {bar}")
    panel.margins(x=0.15)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
