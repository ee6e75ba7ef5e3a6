"""Pure: from what the ranks saw, round by round, to figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.bench.rounds import median_interval, ratio

__all__ = ["summarize"]

Interval = dict[str, float]

_COPY, _GLOO, _LOCAL, _OURS = "copy", "gloo", "not synchronized", "syncline"


def summarize(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The raw measurement with medians, bandwidths and ratios, every round kept.

    An interval is the median over rounds with its bootstrapped 95 % confidence interval; a ratio is that of the two
    times of one round.

    Args:
        raw: what `ranks.measure` returns.
    """
    return {
        **raw,
        "all_reduce": [_all_reduce(row) for row in raw["all_reduce"]],
        "steps": [_steps(row) for row in raw["steps"]],
    }


def _all_reduce(row: Mapping[str, Any]) -> dict[str, Any]:
    seconds: Mapping[str, Sequence[float]] = row["seconds"]
    found = {}
    for name, rounds in seconds.items():
        figures = _figures(rounds)
        figures["payload_bytes_per_second"] = row["payload_bytes"] / figures["median_seconds"]
        if name != _COPY and name != _GLOO and _GLOO in seconds:
            figures["times_as_fast_as_gloo"] = _interval(ratio(seconds[_GLOO], rounds))
        if name == _COPY:
            # A byte is read and a byte is written.
            figures["moved_bytes_per_second"] = 2 * figures["payload_bytes_per_second"]
        elif name.startswith(_OURS) and _COPY in seconds:
            figures["share_of_copy"] = _interval(ratio(seconds[_COPY], rounds))
        figures["num_calls"] = row["num_calls"][name]
        figures["rounds_seconds"] = list(rounds)
        found[name] = figures
    return {"payload_bytes": row["payload_bytes"], "engines": found}


def _steps(row: Mapping[str, Any]) -> dict[str, Any]:
    seconds: Mapping[str, Sequence[float]] = row["seconds"]
    theirs = [name for name in seconds if _GLOO in name]
    rival = min(theirs, key=lambda name: statistics.median(seconds[name]))
    found = {}
    for name, rounds in seconds.items():
        figures = _figures(rounds)
        figures["ratio"] = _interval(ratio(rounds, seconds[rival]))
        if name != _LOCAL:
            exposed = [(a - b) / b for a, b in zip(rounds, seconds[_LOCAL], strict=True)]
            figures["exposed"] = _interval(median_interval(exposed))
        figures["rounds_seconds"] = list(rounds)
        found[name] = figures
    kept = {name: row[name] for name in ("model", "num_parameters", "num_steps")}
    return {**kept, "rival": rival, "competitors": found}


def _figures(rounds: Sequence[float]) -> dict[str, Any]:
    middle, low, high = median_interval(rounds)
    return {"median_seconds": middle, "low_seconds": low, "high_seconds": high}


def _interval(found: tuple[float, float, float]) -> Interval:
    return dict(zip(("median", "low", "high"), found, strict=True))
