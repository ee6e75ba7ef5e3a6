"""The data of a report, as `syncline report --format json` prints them and as the page draws them (pure functions).

The page needs every span of every rank to draw a step. A long run has too many steps for this, so the document has a
typical step, the slowest and the first one, the steps around each change of the ranks, and others at even distances.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from syncline.tools.plan.machine import Machine
from syncline.tools.report.analysis import EXPOSED, PARTS, BucketFigures, Figures, divergences_in, figures_of
from syncline.tools.report.planned import predicted_rows
from syncline.tools.report.run import Run
from syncline.tools.report.steps import RankStep
from syncline.tools.report.verdict import verdict_on
from syncline.tracing import rows
from syncline.words import format_bytes, format_count, format_time

MAX_SPANS = 60_000
"""The largest number of spans of all steps in a document, so that a browser draws it at once."""

MAX_STEPS = 300

MAX_POINTS = 2000
"""The largest number of points of a curve."""


_TEXTS = ("kind", "headline", "detail", "cure")
"""The fields of a finding that a report contains."""


def document_of(run: Run, machine: Machine) -> dict[str, Any]:
    """Return the data of a report. Times are in microseconds.

    Args:
        run: the run.
        machine: what synchronization costs, for a prediction that is compared with the run.
    """
    figures = figures_of(run)
    lengths, stragglers = _over_time(run)
    return {
        "title": _title(run),
        "subtitle": _subtitle(run),
        "findings": [{name: getattr(one, name) for name in _TEXTS} for one in verdict_on(run, figures)],
        "num_steps": figures.num_steps,
        "facts": _facts(figures) if figures.num_steps else [],
        "parts": _parts(figures),
        "choices": _choices(run),
        "steps": {str(number): _step(run.steps[number]) for number in _shown(run)},
        "lengths": lengths,
        "ranks": {str(rank): dict(own) for rank, own in figures.phases_of_ranks.items()},
        "stragglers": stragglers,
        "buckets": [_bucket(one) for one in figures.buckets],
        "contract": _contract(run),
        "metrics": _metrics(run),
        "events": _events(run),
        "predicted": predicted_rows(run, figures, machine),
    }


def _title(run: Run) -> str:
    hosts = {one.process.host for one in run.processes}
    command = Path(run.processes[0].process.command.split(" ")[0] or "a program").name
    return f"{command}: {format_count(run.num_ranks, 'rank')} on {format_count(len(hosts), 'host')}"


def _subtitle(run: Run) -> str:
    first = run.processes[0].process
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(first.unix_seconds))
    parts = [when, *(f"{name} {version}" for name, version in first.versions.items())]
    if run.module is not None:
        parts.append(f"module {run.module}")
    parts.append(format_count(len(run.steps), "step"))
    if run.clock_error:
        parts.append(f"the clocks of the hosts are compared to within {format_time(run.clock_error / 1e6)}")
    if any(one.is_cut for one in run.processes):
        parts.append("the middle of the run was left out, because the trace is large")
    return ", ".join(parts)


def _facts(figures: Figures) -> list[dict[str, str]]:
    steps, part = format_count(figures.num_steps, "step"), "the part of the mean step"
    own, late = 1 - figures.exposed, figures.share("late")
    sent = format_bytes(int(figures.payload_bytes))
    transfers = figures.share(*(one for one in EXPOSED if one != "late"))
    facts = (
        ("a step", format_time(figures.step / 1e6), f"the mean of {steps}, of all ranks"),
        ("steps a second", f"{1e6 / max(1.0, figures.step):.3g}", ""),
        ("own work", _percent(own), f"{part} in which ranks do not wait for each other or for the transport"),
        ("waiting for transfers", _percent(transfers), f"{part} that waits for the transport"),
        ("waiting for late ranks", _percent(late), f"{part} that waits for ranks that are late"),
        ("sent in a step", sent, "the mean of the bytes that each rank passes to the transport"),
    )
    return [{"name": name, "value": value, "hint": hint} for name, value, hint in facts]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _parts(figures: Figures) -> list[dict[str, Any]]:
    return [
        {"part": part, "words": words, "us": round(figures.parts.get(part, 0)), "share": figures.share(part)}
        for part, words in PARTS.items()
        if figures.parts.get(part, 0) >= 1
    ]


# ---------------------------------------------------------------------- steps


def _choices(run: Run) -> dict[str, int]:
    steady = run.steady
    if not steady:
        return {}
    mean = fmean(map(run.length, steady))
    typical = min(steady, key=lambda number: abs(run.length(number) - mean))
    return {"typical": typical, "slowest": max(steady, key=run.length), "first": min(run.steps)}


def _shown(run: Run) -> list[int]:
    """Return the numbers of the steps that the document has in full."""
    numbers = list(run.steps)
    if not numbers:
        return []
    spans = max(1, sum(len(one.spans) + len(one.buckets) for one in run.steps[numbers[-1]].values()))
    most = min(MAX_STEPS, max(3, MAX_SPANS // spans))
    chosen = set(_choices(run).values())
    events = [*(one.step for one in run.changes), *(one.step for one in divergences_in(run))]
    for step in events:
        chosen |= {number for number in numbers if abs(number - step) <= 1}
    chosen |= set(_thinned(numbers, max(0, most - len(chosen))))
    return sorted(chosen)


def _thinned(found: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most `most` items, evenly spaced, with the first and the last one."""
    if len(found) <= most:
        return found
    if most < 2:
        return found[:most]
    return [found[round(at * (len(found) - 1) / (most - 1))] for at in range(most)]


def _step(ranks: Mapping[int, RankStep]) -> dict[str, Any]:
    first = min(one.began for one in ranks.values())
    return {
        str(rank): {
            "began": one.began - first,
            "ended": one.ended - first,
            "spans": [[s.kind, s.began - first, s.ended - first, s.label] for s in one.spans],
            "buckets": [
                [b.bucket, b.sent - first, b.wait_began - first, b.reduced - first] for b in one.buckets
            ],
        }
        for rank, one in sorted(ranks.items())
    }


def _over_time(run: Run) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the length of each step with its waits, and the rank for which the others waited in it."""
    lengths: list[list[int]] = []
    stragglers: list[list[Any]] = []
    for number in _thinned(list(run.steps), MAX_POINTS):
        figures, length = figures_of(run, [number]), run.length(number)
        lengths.append([number, length, round(figures.parts["late"]), round(figures.parts["transfer"])])
        late = figures.late
        if late is not None and late.caused >= 0.02 * length:
            stragglers.append([number, late.rank, round(late.caused), late.phase])
    return lengths, stragglers


def _bucket(one: BucketFigures) -> dict[str, Any]:
    return {
        "bucket": one.bucket,
        "bytes": one.payload_bytes,
        "parameters": list(one.parameters),
        "late": round(one.late),
        "transfer": round(one.transfer),
        "sent": round(one.sent),
        "waits_for": one.waits_for,
    }


# ---------------------------------------------------------------------- the rest


def _contract(run: Run) -> dict[str, Any]:
    found = [row for row in run.modules if row.module == run.module and row.contract]
    if not found:
        return {}
    # The contract was recorded with the buckets, in one of the first steps, so its `last_done` is outdated.
    rules = [{**row, "last_done": ""} for row in found[-1].contract.get("rows", ())]
    return {**found[-1].contract, "rows": rules}


def _metrics(run: Run) -> dict[str, list[list[float | None]]]:
    found: dict[str, list[list[float | None]]] = {}
    for number, ranks in run.steps.items():
        for name, value in next(iter(ranks.values())).metrics.items():
            found.setdefault(name, []).append([number, value if math.isfinite(value) else None])
    return {name: list(_thinned(values, MAX_POINTS)) for name, values in found.items()}


def _events(run: Run) -> list[dict[str, Any]]:
    found = [
        {
            "step": row.step,
            "kind": "ranks",
            "words": f"{row.reason}; the ranks, now {row.num_ranks}, continued after "
            f"{format_time((row.ended - row.began) / 1e6)}",
        }
        for row in run.changes
    ]
    for one in divergences_in(run):
        found.append({"step": one.step, "kind": "diverged", "words": f"{one.fact}. {one.detail}"})
    slow: dict[tuple[int, int], str] = {}
    for row in run.rows_of(rows.SlowRow):
        slow.setdefault((row.step, row.rank), row.words)
    found += [{"step": step, "kind": "slow", "words": words} for (step, _), words in slow.items()]
    words = "the step was discarded, because gradients were not finite"
    found += [{"step": number, "kind": "discarded", "words": words} for number in run.discarded]
    for process in run.processes:
        end, last = process.end, max(run.steps, default=0)
        if end is not None and (end.is_error or end.is_of("KeyboardInterrupt")):
            kind = "failed" if end.is_error else "stopped"
            found.append({"step": last, "kind": kind, "words": f"rank {process.process.rank} {end.words}"})
    return sorted(found, key=lambda event: event["step"])
