"""Functions that time competitors in rounds.

In each round, every competitor has one turn, so that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from syncline.transport.base import Transport

Timer = Callable[[int], float]
"""A function that makes a given number of calls, and returns the time of all these calls in seconds.

All ranks call it together. Each rank gets the time that it has measured itself.
"""


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
    timers: Mapping[str, Timer], *, num_rounds: int, num_calls: Mapping[str, int], transport: Transport
) -> dict[str, list[float]]:
    """Time the competitors in rounds. In each round, every competitor has one turn.

    Args:
        timers: the timer of each competitor, by name. All ranks must pass the same competitors. The order of their
            turns differs from round to round.
        num_rounds: the number of rounds in the result. Two more rounds run first as a warm-up.
        num_calls: the number of calls in one turn of each competitor, by name.
        transport: the transport between the ranks.

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
