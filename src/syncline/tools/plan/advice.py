"""Which option to choose, why, and from when the others pay; the plan as text (pure functions)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

from syncline.contract import table
from syncline.tools.plan.cluster import rate_text
from syncline.tools.plan.options import KINDS, Option, with_caps
from syncline.tools.plan.predict import Planner, Prediction
from syncline.words import MAX_COLUMNS, format_bytes, format_count, format_time, wrapped

_NEARLY = 1.02
"""A difference of 2 % is no reason to set an argument."""

_WORTH = 0.25
"""An option that changes the training has to make the step shorter by this part of it."""

_MOST_OF = 0.8
"""An option that changes the training less is recommended if it saves this part of what the fastest option saves."""

_LEAST_SPEEDUP = 1.2

USUAL_ERROR = 0.15
"""How far measured steps are from predicted ones at most, in `benchmarks/plan_audit.py` on a measured machine."""

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
    """The options to choose."""

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
    best = [best_of(planner, kind) for kind in KINDS]
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


# ---------------------------------------------------------------------- the plan as text


def plan_text(planner: Planner, advice: Advice) -> str:
    """Return the plan as `syncline plan` prints it."""
    parts = [
        _head(planner),
        *advice.warnings,
        _choice(planner, advice),
        _reasons(planner, advice),
        _table(planner, advice),
    ]
    return "\n\n".join(
        "\n".join(short for line in part.splitlines() for short in wrapped(line)) for part in parts
    )


def _head(planner: Planner) -> str:
    job, cluster, machine = planner.job, planner.cluster, planner.machine
    many = f"{format_count(cluster.num_ranks, 'rank')} on {format_count(cluster.hosts, 'host')}"
    cores = "" if cluster.engine == "nccl" else f" of {format_count(cluster.cores_per_host, 'core')}"
    link = ""
    if cluster.link_bytes_per_second is not None and cluster.hosts > 1:
        link = f", {rate_text(cluster.link_bytes_per_second)} between hosts"
    lines = [
        f"{job.name}: {_count(job.numel)} parameters, {format_bytes(job.num_bytes)} of gradients",
        f"{many}{cores}{link}",
        f"costs: {machine.name}",
    ]
    if not machine.is_measured:
        lines.append("  this machine was not measured: run `syncline bench --calibrate` once (a minute)")
    return "\n".join(lines)


def _choice(planner: Planner, advice: Advice) -> str:
    one = advice.recommended
    if planner.cluster.num_ranks == 1:
        return f"One rank has nothing to synchronize: a step takes {format_time(one.step)}."
    code = f"sl.DistributedDataParallel(model{', ' if one.option.code else ''}{one.option.code})"
    lines = [f"Use {code}", f"  {_sentence(planner, one)}", f"  {_speedup_in_words(planner, advice)}"]
    if not one.option.is_exact:
        exact = advice.exact
        lines += [
            "  It changes the training: compare the loss with a run that averages every gradient exactly.",
            f"  The fastest exact way takes {format_time(exact.step)}: {exact.option.words}",
        ]
    return "\n".join(lines)


def _sentence(planner: Planner, one: Prediction) -> str:
    if one.exposed >= 0:
        part = f"of which {format_time(one.exposed)} ({one.exposed / one.step:.0%}) is synchronization"
    else:
        part = f"less than the computation of one process, {format_time(one.compute)}"
    spread = "How wrong this can be is not known: the costs are those of another machine."
    if planner.machine.is_measured:
        least, most = ((1 + error) * one.step for error in (-USUAL_ERROR, USUAL_ERROR))
        spread = f"Expect {format_time(least)} to {format_time(most)}."
    return f"A step takes about {format_time(one.step)}, {part}. {spread}"


def _speedup_in_words(planner: Planner, advice: Advice) -> str:
    """Return how much faster the ranks train than one process, and why that may be more than their number."""
    num_ranks, one = planner.cluster.num_ranks, advice.recommended
    text = (
        f"In a second, {num_ranks:,} ranks train on {_times(advice.speedup)} times as many samples as one process "
        "(each with the batch and the cores of one rank)"
    )
    if advice.speedup > num_ranks and one.exposed < 0:
        text += (
            f". This is more than {num_ranks:,} times, because a rank steps only its part of the parameters: the "
            f"optimizer's step, which takes one process {format_time(planner.job.update)}, becomes shorter"
        )
    return f"{text}."


def _reasons(planner: Planner, advice: Advice) -> str:
    """Return the three numbers that have decided."""
    job, exact = planner.job, advice.exact
    has_link = planner.cluster.hosts > 1
    can_hide = has_link or planner.cluster.has_idle_cores
    rows = [
        [f"a step's computation on each rank ({job.times})", format_time(job.compute)],
        [
            f"all gradients {'on the link' if has_link else 'in the transport'}, uncompressed",
            format_time(exact.on_link),
        ],
        ["the backward, which can hide them", format_time(job.backward)]
        if can_hide
        else ["idle cores, which could hide them", "none"],
    ]
    return "The numbers that decided\n" + indent(table(rows), "  ")


def _table(planner: Planner, advice: Advice) -> str:
    step = f"step \u00b1 {USUAL_ERROR:.0%}".replace("%", " %") if planner.machine.is_measured else "step"
    rows = [["", step, "sync", "sent a step", "memory", ""]]
    for other in advice.alternatives:
        one = other.prediction
        rows.append(
            [
                one.option.words,
                format_time(one.step),
                f"{max(0.0, one.exposed) / one.step:.0%}",
                format_bytes(round(one.sent_bytes)),
                format_bytes(round(one.memory_bytes)),
                other.pays,
            ]
        )
    title = "All ways, from the one that changes a training least (memory: of a rank, "
    title += "with its batch)" if planner.job.activation_bytes else "without its batch)"
    body = indent(table(rows, MAX_COLUMNS - 2), "  ")
    return f"{title}\n{body}\n  sharded=True cannot be combined with a compression yet, so no way has both."


def plan_json(planner: Planner, advice: Advice) -> dict[str, Any]:
    """Return the plan as a dict for JSON. Times are in seconds."""
    return {
        "job": planner.job.name,
        "num_parameters": planner.job.numel,
        "num_ranks": planner.cluster.num_ranks,
        "hosts": planner.cluster.hosts,
        "machine": planner.machine.name,
        "machine_is_measured": planner.machine.is_measured,
        "compute": planner.job.compute,
        "recommended": _row(advice.recommended),
        "exact": _row(advice.exact),
        "speedup": advice.speedup,
        "warnings": list(advice.warnings),
        "options": [{**_row(one.prediction), "pays": one.pays} for one in advice.alternatives],
    }


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "arguments": one.option.code,
        "step": one.step,
        "exposed": one.exposed,
        "sent_bytes": one.sent_bytes,
        "wire_bytes": one.wire_bytes,
        "memory_bytes": one.memory_bytes,
        "num_buckets": one.num_buckets,
    }


def _count(number: int) -> str:
    """Return a large number with a unit.

    Examples:
        >>> _count(1_312_000_000), _count(4_800_000), _count(990)
        ('1.31 billion', '4.8 million', '990')
    """
    for word, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {word}"
    return f"{number:,}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
