"""A plan as text (pure functions)."""

from __future__ import annotations

from textwrap import indent
from typing import Any

from syncline.contract import table
from syncline.tools.plan.advice import Advice
from syncline.tools.plan.cluster import rate_text
from syncline.tools.plan.predict import Planner, Prediction
from syncline.words import MAX_COLUMNS, format_bytes, format_count, format_time, wrapped

USUAL_ERROR = 0.15
"""How far measured steps are from predicted ones at most, in `benchmarks/plan_audit.py` on a measured machine."""


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
    lines = [f"Use {code}", f"  {_sentence(planner, one)}", f"  {_speedup(planner, advice)}"]
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
    return f"A step takes about {format_time(one.step)}, {part}. {_spread(planner, one.step)}"


def _spread(planner: Planner, step: float) -> str:
    """Return how far a measured step may be from the predicted one."""
    if not planner.machine.is_measured:
        return "How wrong this can be is not known: the costs are those of another machine."
    return f"Expect {format_time((1 - USUAL_ERROR) * step)} to {format_time((1 + USUAL_ERROR) * step)}."


def _speedup(planner: Planner, advice: Advice) -> str:
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
