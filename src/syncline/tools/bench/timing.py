"""Functions that time competitors in rounds, and that summarize the rounds.

In each round, every competitor has one turn, so that a change of the machine's speed affects all of them. `summarize`
is a pure function. It computes medians, ratios and intervals from the times of the rounds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncline.transport.base import Transport

Timer = Callable[[int], float]
"""A function that makes a given number of calls, and returns the time of all these calls in seconds.

All ranks call it together. Each rank gets the time that it has measured itself.
"""

_NUM_DRAWS = 2000


def timer(call: Callable[[], object], transport: Transport) -> Timer:
    """Return a timer of the function `call`.

    The time includes the wait for the slowest rank, because ranks that share a core take turns on it.

    Args:
        call: the function to time. All ranks must pass the same function.
        transport: the transport between the ranks.
    """

    def seconds_for(num_calls: int) -> float:
        transport.barrier().wait()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        transport.barrier().wait()
        return time.perf_counter() - start

    return seconds_for


def alternate(
    timers: Mapping[str, Timer],
    *,
    num_rounds: int,
    num_calls: Mapping[str, int],
    transport: Transport,
    after_round: Callable[[int], object] = lambda number: None,
) -> dict[str, list[float]]:
    """Time the competitors in rounds. In each round, every competitor has one turn.

    Args:
        timers: the timer of each competitor, by name. All ranks must pass the same competitors. The order of their
            turns differs from round to round.
        num_rounds: the number of rounds in the result. Two more rounds run first as a warm-up.
        num_calls: the number of calls in one turn of each competitor, by name.
        transport: the transport between the ranks.
        after_round: a function that is called after each round, with the number of the round from 1.

    Returns:
        For each competitor, a list with one time per round: the seconds per call on the slowest rank.
    """
    mine: dict[str, list[float]] = {name: [] for name in timers}
    for round_index in range(-2, num_rounds):
        order = list(timers)
        random.Random(round_index).shuffle(order)  # the same order on all ranks
        for name in order:
            seconds = timers[name](num_calls[name])
            if round_index >= 0:
                mine[name].append(seconds / num_calls[name])
        after_round(round_index + 1)
    slowest = _slowest([seconds for rounds in mine.values() for seconds in rounds], transport)
    return {name: slowest[i * num_rounds : (i + 1) * num_rounds] for i, name in enumerate(mine)}


def calls_for(
    timers: Mapping[str, Timer], *, seconds: float, most: int, transport: Transport
) -> dict[str, int]:
    """Return the number of calls for one turn of each competitor. The result is the same on all ranks.

    Args:
        timers: the timer of each competitor, by name.
        seconds: the desired duration of a turn.
        most: the largest number of calls in a turn. The smallest is 1.
        transport: the transport between the ranks.
    """
    for warm_up in timers.values():
        warm_up(1)
    found = _slowest([measure(3) / 3 for measure in timers.values()], transport)
    return {
        name: max(1, min(most, math.ceil(seconds / max(one, 1e-9))))
        for name, one in zip(timers, found, strict=True)
    }


def _slowest(seconds: Sequence[float], transport: Transport) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    transport.all_reduce(slowest, "max").wait()
    return [float(one) for one in slowest.tolist()]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of `values`, and the lower and upper bound of its bootstrapped 95 % confidence interval.

    Examples:
        >>> median_interval([1.0] * 5)
        (1.0, 1.0, 1.0)
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_NUM_DRAWS))
    return statistics.median(values), medians[_NUM_DRAWS // 40], medians[-_NUM_DRAWS // 40 - 1]


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


_COPY, _GLOO, _LOCAL, _OURS = "copy", "gloo", "not synchronized", "syncline"


def summarize(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Add medians, bandwidths and ratios to a raw measurement. The result still has the times of all rounds.

    Each median and ratio comes with its bootstrapped 95 % confidence interval. For a ratio, the times of two
    competitors in the same round are divided. The ratio is the median of these quotients over all rounds.

    Args:
        raw: the result of `ranks.measure`.
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
            # Each byte is read once and written once.
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
    names = ("median_seconds", "low_seconds", "high_seconds")
    return dict(zip(names, median_interval(rounds), strict=True))


def _interval(found: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("median", "low", "high"), found, strict=True))
