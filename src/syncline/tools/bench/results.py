"""Parses sizes, and shows a measurement: medians, ratios and intervals, as a text and as a picture;
and describes this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import random
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import syncline
from syncline.contract import table
from syncline.environment import num_cores
from syncline.words import MAX_COLUMNS

SUFFIXES = (".png", ".svg")

_NUM_DRAWS = 2000

_RATIO = "{:.2f} [{:.2f}, {:.2f}]"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a size such as "64K" or "1.5M", and return its number of bytes. 1K is 1024 bytes.

    Raises:
        ValueError: the text is not a size, or the size is not a multiple of 4 bytes, the size of an fp32 element.

    Examples:
        >>> parse_size("64K"), parse_size("1MiB"), parse_size("400")
        (65536, 1048576, 400)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size such as 1K, 64K or 25M, got {text!r}")
    size_bytes = float(found.group(1)) * _UNITS[found.group(2).upper()]
    if size_bytes < 4 or size_bytes % 4:
        raise ValueError(f"{text}: expected a positive multiple of 4 bytes, the size of an fp32 element")
    return int(size_bytes)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of `values`, and the lower and upper bound of its bootstrapped 95 % confidence interval.

    Examples:
        >>> median_interval([1.0] * 5)
        (1.0, 1.0, 1.0)
    """
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(_NUM_DRAWS))
    return median(values), medians[_NUM_DRAWS // 40], medians[-_NUM_DRAWS // 40 - 1]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Divide `ours` by `theirs` in each round. Return the median of these ratios and its 95 % confidence interval.

    Args:
        ours: the times of one competitor, by round.
        theirs: the times of another competitor, by round.

    Returns:
        The median, and the lower and upper bound of its bootstrapped confidence interval.
    """
    return median_interval(quotients(ours, theirs))


def quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide the times of one competitor by those of another one, round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def report(found: Mapping[str, Any]) -> str:
    """Format a measurement as the text that `syncline bench` prints.

    Args:
        found: what `ranks.py` has written.
    """
    machine, num_ranks, cores = found["machine"], found["num_ranks"], found["machine"]["num_cores"]
    lines = [
        f"{num_ranks} ranks x 1 thread on {cores} cores of {machine['cpu']}, load {machine['load']:.2f}",
        f"torch {machine['torch']}, syncline {machine['syncline']} over {found['transport']}",
        f"medians over {found['num_rounds']} rounds in which all take turns [95 % interval], on the slowest rank",
    ]
    if num_ranks > cores:
        lines.append(f"more ranks than cores: {num_ranks} ranks share {cores} cores, and wait for a core")
    if machine["load"] > 0.5 * cores:
        lines.append("the machine was not idle when the benchmark started: expect wide intervals")
    reductions, steps = found["all_reduce_seconds"], found["step_seconds"]
    cells = [["all_reduce, us", *next(iter(reductions.values())), "times as fast as gloo"]]
    for size, rounds in reductions.items():
        times = [f"{1e6 * median(seconds):,.1f}" for seconds in rounds.values()]
        cells.append([size, *times, _RATIO.format(*ratio(rounds["gloo"], rounds["syncline"]))])
    parts = ["\n".join(lines), table(cells, MAX_COLUMNS)]
    for model, rounds in steps.items():
        cells = [[f"a step of {model} parameters", "ms", "times as long as not synchronized"]]
        for name, seconds in rounds.items():
            times_local = _RATIO.format(*ratio(seconds, rounds["not synchronized"]))
            cells.append([name, f"{1e3 * median(seconds):.1f}", times_local])
        parts.append(table(cells, MAX_COLUMNS))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- the picture


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the time of all_reduce by size, and the times of training steps.

    Args:
        found: what `ranks.py` has written.
        path: the image file to write. Its name ends with one of `SUFFIXES`.
    """
    importlib.import_module("matplotlib").use("agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    reductions, steps = found["all_reduce_seconds"], found["step_seconds"]
    figure = figures.Figure(figsize=(5.2 * (1 + len(steps)), 4.4), layout="constrained")
    times, *panels = figure.subplots(1, 1 + len(steps), squeeze=False)[0]
    for name in next(iter(reductions.values())):
        medians = [1e6 * median(rounds[name]) for rounds in reductions.values()]
        times.plot([parse_size(size) for size in reductions], medians, label=name, marker="o", markersize=3)
    times.set(xscale="log", yscale="log", xlabel="payload, bytes", title="all_reduce: time, us")
    times.legend(fontsize="small")
    for (model, rounds), panel in zip(steps.items(), panels, strict=True):
        panel.barh(list(rounds), [1e3 * median(seconds) for seconds in rounds.values()])
        panel.invert_yaxis()
        panel.set(title=f"a step of {model} parameters, ms")
    figure.suptitle(f"{found['num_ranks']} ranks, {found['machine']['cpu']}", fontsize="medium")
    figure.savefig(path, dpi=150)


def total_memory_bytes() -> int:
    """Return the total size of this host's physical memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_machine() -> dict[str, Any]:
    """Return the hardware and the load of this machine and the versions of its software, as a dict for JSON."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "num_cores": num_cores(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "syncline": syncline.__version__,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or "an unnamed CPU"
