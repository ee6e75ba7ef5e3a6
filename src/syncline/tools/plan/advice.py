"""Which option to choose, why, and from when the others pay (pure functions)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from syncline.tools.plan.cluster import rate_text
from syncline.tools.plan.options import Option, kinds_of_options, with_caps
from syncline.tools.plan.predict import Planner, Prediction
from syncline.words import format_bytes, format_time

_NEARLY = 1.02
"""A difference of 2 % is no reason to set an argument."""

_WORTH = 0.25
"""An option that changes the training has to make the step shorter by this part of it."""

_MOST_OF = 0.8
"""An option that changes the training less is recommended if it saves this part of what the fastest option saves."""

_LEAST_SPEEDUP = 1.2

_RANGE = (1e3, 1e13)
"""The bandwidths between which a crossing is looked for, in bytes a second."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best option of one kind, which a user could choose instead."""

    prediction: Prediction
    pays: str
    """From when it is faster than the fastest exact option, in words; or that it needs more memory than a rank has."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to choose."""

    exact: Prediction
    """The fastest of the options that do not change the training."""
    recommended: Prediction
    """The exact one, or one that is much faster and changes the training as little as possible."""
    fastest: Prediction
    alternatives: Sequence[Alternative]
    """The best of each kind, from the one that changes a training least to the one that changes it most."""
    speedup: float
    """How many times as many samples as one process alone all ranks train on in a second."""
    warnings: Sequence[str]
    """Why data parallelism may be the wrong tool here; empty if it is not."""


def advice_on(planner: Planner) -> Advice:
    """Return what to choose for a job on a cluster."""
    best = [best_of(planner, kind) for kind in kinds_of_options()]
    fitting = [one for one in best if _fits(planner, one)] or best
    exact_ones = [one for one in best if one.option.is_exact]
    exact = min([one for one in exact_ones if one in fitting] or exact_ones, key=lambda one: one.step)
    # Sharding is worth an argument of its own only if it is clearly faster, or saves memory that is needed.
    plain = best[0]
    if plain.step <= _NEARLY * exact.step and _fits(planner, plain):
        exact = plain
    fastest = min(fitting, key=lambda one: one.step)
    recommended = exact if exact in fitting else fastest
    if fastest.step < (1 - _WORTH) * exact.step:
        enough = exact.step - _MOST_OF * (exact.step - fastest.step)
        recommended = next(one for one in fitting if one.step <= enough)
    if _speedup(planner, recommended) < _LEAST_SPEEDUP:
        recommended = fastest
    speedup = _speedup(planner, recommended)
    return Advice(
        exact=exact,
        recommended=recommended,
        fastest=fastest,
        alternatives=[
            Alternative(
                prediction=one,
                pays=pays(planner, one.option, exact.option) if _fits(planner, one) else "does not fit",
            )
            for one in best
        ],
        speedup=speedup,
        warnings=_warnings(planner, best, speedup),
    )


def _speedup(planner: Planner, one: Prediction) -> float:
    """Return how many times as many samples all ranks train on as one process alone, in the same time."""
    alone = planner.job.compute / planner.cluster.crowding
    return planner.cluster.num_ranks * alone / one.step


def best_of(planner: Planner, kind: Option) -> Prediction:
    """Return the prediction of an option with its fastest bucket size, or with the automatic one if nearly as fast."""
    found = [planner.predict(one) for one in with_caps(kind)]
    best = min(found, key=lambda one: one.step)
    return found[0] if found[0].step <= _NEARLY * best.step else best


def pays(planner: Planner, option: Option, exact: Option) -> str:
    """Return from when an option is faster than the exact one, in words.

    On several hosts this is a bandwidth. On one host it is the length of a step's computation.
    """
    if option.is_exact:
        return "exact, as torch's class"
    job, cluster, has_link = planner.job, planner.cluster, planner.cluster.hosts > 1

    def is_faster_at(value: float) -> bool:
        if has_link:
            there = replace(planner, cluster=replace(cluster, link_bytes_per_second=value))
        else:
            there = replace(planner, job=job.slower(value / job.compute))
        return there.predict(option).step < there.predict(exact).step

    found = crossing(is_faster_at, *(_RANGE if has_link else (job.compute / 1e4, job.compute * 1e4)))
    if has_link:
        if found is not None:
            return f"faster below {rate_text(found)}"
        return "faster on every link" if is_faster_at(_RANGE[1]) else "faster on no link"
    if found is not None:
        return f"faster below {format_time(found)} of computing"
    return "always faster" if is_faster_at(job.compute) else "never faster here"


def crossing(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the value below which a condition holds; None if there is none between the bounds.

    Examples:
        >>> round(crossing(lambda x: x < 30.0, 1.0, 1000.0))
        30
    """
    if not holds(low) or holds(high):
        return None
    for _ in range(25):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _fits(planner: Planner, one: Prediction) -> bool:
    limit = planner.cluster.memory_of_rank_bytes
    return limit is None or one.memory_bytes <= limit


def _warnings(planner: Planner, best: Sequence[Prediction], speedup: float) -> list[str]:
    found = []
    limit = planner.cluster.memory_of_rank_bytes
    least = min(best, key=lambda one: one.memory_bytes)
    if limit is not None and least.memory_bytes > limit:
        found.append(
            f"It does not fit: a rank needs at least {_memory(least.memory_bytes)} ({least.option.words}), and has "
            f"{_memory(limit)}. Divide the parameters themselves: torch's FSDP (fully_shard), or a pipeline."
        )
    elif limit is not None and not _fits(planner, best[0]):
        found.append(
            f"With the defaults it does not fit: a rank needs {_memory(best[0].memory_bytes)}, and has "
            f"{_memory(limit)}. {least.option.words} needs {_memory(least.memory_bytes)}."
        )
    if planner.cluster.num_ranks > 1 and speedup < _LEAST_SPEEDUP:
        found.append(
            f"{planner.cluster.num_ranks} ranks train only {speedup:.2f} times as fast as one process with the cores "
            "of one rank. Use one process, a larger batch for each rank, or accumulate gradients over several batches."
        )
    return found


def _memory(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))
