"""A report as text: the verdict, where the time of a step goes, the ranks and the buckets; two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.contract import table
from syncline.tools.report.analysis import ENOUGH_STEPS, PHASES
from syncline.words import MAX_COLUMNS, format_bytes, format_time, wrapped

_MAX_ROWS = 12
"""The number of ranks or buckets to list. The text says how many more there are."""


def text_of(document: Mapping[str, Any]) -> str:
    """Return a report as text of at most 100 columns.

    Args:
        document: the result of `document_of`.
    """
    parts = ["\n".join([*wrapped(document["title"], indent=""), *wrapped(document["subtitle"], indent="")])]
    parts += [_finding(one) for one in document["findings"]]
    if document["parts"]:
        rows = [
            (f"  {one['words']}", _time(one["us"]), f"{100 * one['share']:.0f} %")
            for one in document["parts"]
        ]
        parts.append(_listed(("a step (means)", "", ""), rows))
    if len(document["ranks"]) > 1:
        phases = [
            (f"  {rank}", *(_time(own[phase]) for phase in PHASES)) for rank, own in document["ranks"].items()
        ]
        parts.append(_listed(("rank (means)", *PHASES), phases))
    if document["buckets"]:
        heads = ("bucket (means)", "bytes", "waits: late rank", "transport", "sent last by", "parameters")
        parts.append(_listed(heads, list(map(_bucket, document["buckets"]))))
    if document["events"]:
        lines = [f"step {event['step']}: {event['words']}" for event in document["events"][:_MAX_ROWS]]
        parts.append("\n".join(short for line in lines for short in wrapped(line, indent="  ")))
    if document["predicted"]:
        rows = [(f"  {one['what']}", one["predicted"], one["measured"]) for one in document["predicted"]]
        parts.append(_listed(("syncline plan", "predicted", "measured"), rows))
    return "\n\n".join(parts)


def _bucket(one: Mapping[str, Any]) -> tuple[str, ...]:
    waits_for, names = one["waits_for"], one["parameters"]
    return (
        f"  {one['bucket']}",
        format_bytes(one["bytes"]),
        _time(one["late"]),
        _time(one["transfer"]),
        "-" if waits_for is None else f"rank {waits_for}",
        ", ".join(names) if len(names) < 3 else f"{names[0]} ...",
    )


def _finding(one: Mapping[str, str], indent: str = "") -> str:
    lines = wrapped(indent + one["headline"], indent="")
    for more in (one["detail"], one["cure"]):
        if more:
            lines += wrapped(f"{indent}  {more}", indent="")
    return "\n".join(lines)


def _listed(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table of the first rows. Its last line says how many more there are."""
    more = len(rows) - _MAX_ROWS
    text = table([heads, *rows[:_MAX_ROWS]], MAX_COLUMNS)
    return text if more <= 0 else f"{text}\n  and {more} more"


def _time(micros: float) -> str:
    return format_time(micros / 1e6) if micros >= 50 else "-"


def compared(names: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of two runs, side by side, and the largest differences.

    Args:
        names: the names of the runs.
        documents: the results of `document_of`.
    """
    one, two = documents
    rows: list[tuple[str, ...]] = [("", *names, "")]
    facts = {fact["name"]: fact["value"] for fact in two["facts"]}
    rows += [(fact["name"], fact["value"], facts.get(fact["name"], "-"), "") for fact in one["facts"]]
    times = [{part["words"]: part["us"] for part in document["parts"]} for document in documents]
    differences = {}
    for words in dict.fromkeys([*times[0], *times[1]]):
        before, after = (own.get(words, 0) for own in times)
        differences[words] = change = after - before
        sign = "" if abs(change) < 1 else f"{'+' if change > 0 else '-'}{format_time(abs(change) / 1e6)}"
        rows.append((f"  {words}", _time(before), _time(after), sign))
    few = min(document["num_steps"] for document in documents) < ENOUGH_STEPS
    lengths = [sum(own.values()) for own in times]
    conclusion = (
        "Too few steps were recorded to compare the runs."
        if few
        else _conclusion(names, lengths, differences)
    )
    lines = [table(rows, MAX_COLUMNS), "\n".join(wrapped(conclusion, indent=""))]
    for name, document in zip(names, documents, strict=True):
        found = [_finding(one, "  ") for one in document["findings"][:2]]
        lines.append("\n".join([*wrapped(f"{name}:"), *found]))
    return "\n\n".join(lines)


def _conclusion(names: Sequence[str], lengths: Sequence[float], differences: Mapping[str, float]) -> str:
    change = lengths[1] / lengths[0] - 1
    if abs(change) < 0.02:
        return f"A step of {names[1]} takes as long as one of {names[0]} (means), up to 2 %."
    words = max(differences, key=lambda one: differences[one] * change)
    most = differences[words]
    return (
        f"A step of {names[1]} takes {100 * abs(change):.0f} % {'more' if change > 0 else 'less'} time than one of "
        f"{names[0]} (means). Most of the difference, {format_time(abs(most) / 1e6)}, is: {words}."
    )
