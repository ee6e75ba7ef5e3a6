"""A function that draws the pictures of `syncline bench --plot` with matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg")


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the results of a measurement: the time and bandwidth of all_reduce by size, and the times of training steps.

    Args:
        summary: the result of `summarize`.
        path: the image file to write. Its name ends with one of `SUFFIXES`.
    """
    importlib.import_module("matplotlib").use("agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    rows, steps = summary["all_reduce"], summary["steps"]
    num_panels = 2 * bool(rows) + len(steps)
    figure = figures.Figure(figsize=(5.2 * num_panels, 4.4), layout="constrained")
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    if rows:
        _draw_all_reduce(rows, panels.pop(0), panels.pop(0))
    for row, panel in zip(steps, panels, strict=True):
        _draw_steps(row, panel)
    machine = summary["machine"]
    figure.suptitle(
        f"{summary['num_ranks']} ranks on {machine['num_cores']} cores, {machine['cpu']}, torch {machine['torch']}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _draw_all_reduce(rows: list[Mapping[str, Any]], times: Any, bandwidths: Any) -> None:
    for name in rows[0]["engines"]:
        sizes = [row["payload_bytes"] for row in rows]
        figures = [row["engines"][name] for row in rows]
        style = {"label": name, "marker": "o", "markersize": 3, "linestyle": "--" if name == "copy" else "-"}
        (line,) = times.plot(sizes, [one["median_seconds"] * 1e6 for one in figures], **style)
        times.fill_between(
            sizes,
            [one["low_seconds"] * 1e6 for one in figures],
            [one["high_seconds"] * 1e6 for one in figures],
            color=line.get_color(),
            alpha=0.2,
        )
        bandwidths.plot(sizes, [one["payload_bytes_per_second"] / 1e9 for one in figures], **style)
    for panel, what in ((times, "time, us"), (bandwidths, "payload / time, GB/s")):
        panel.set(xscale="log", yscale="log", xlabel="payload, bytes", title=f"all_reduce: {what}")
        panel.grid(alpha=0.3)
    times.legend(fontsize="small")


def _draw_steps(row: Mapping[str, Any], panel: Any) -> None:
    names = list(row["competitors"])
    figures = [row["competitors"][name] for name in names]
    middles = [one["median_seconds"] * 1e3 for one in figures]
    below = [middle - one["low_seconds"] * 1e3 for middle, one in zip(middles, figures, strict=True)]
    above = [one["high_seconds"] * 1e3 - middle for middle, one in zip(middles, figures, strict=True)]
    colors = ["tab:blue" if name.startswith("syncline") else "tab:gray" for name in names]
    panel.barh(names, middles, xerr=[below, above], color=colors)
    panel.invert_yaxis()
    panel.set(title=f"{row['model']}: a training step, ms")
