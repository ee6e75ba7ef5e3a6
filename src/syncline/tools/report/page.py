"""Write the page of a report: one HTML file that loads nothing, with the findings as text and tables.

The text and the tables are complete without scripts. The scripts add the pictures, from the data as JSON.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Any

from syncline.tools.report.analysis import PHASES
from syncline.words import format_bytes, format_count

_PLACE = re.compile(r"<!--\[(\w+)\]-->")
"""A place in `page.html` that is filled."""

_SCRIPTS = ("elements", "picture", "charts", "page")

_NUMBER = re.compile(r"\d[\d.,]* (?:%|ms|s|[kMG]?B)(?!\w)")
"""A number with a unit."""

_EVENTS = {"ranks": "ranks changed", "diverged": "replicas differ", "discarded": "step discarded"}
"""The titles of those kinds of events whose names are not meant for users."""

_CONTRACT = ("what", "size", "when", "how", "drift_allowed")

_NUM_NAMES = 4
"""The number of parameters of a bucket that its row shows."""

_LATE_FROM = 0.05
"""A phase of a rank is marked if it takes longer than on other ranks by this fraction of the rank's work."""


class _Markup(str):
    """A text that is HTML already."""

    __slots__ = ()


def page(data: Mapping[str, Any]) -> str:
    """Return the page of a report as one HTML document.

    Args:
        data: the result of `document_of`.
    """
    assets = files("syncline.tools.report")
    scripts = "".join((assets / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    filled = {
        "title": _text(data["title"]),
        "subtitle": _text(data["subtitle"]),
        "css": (assets / "page.css").read_text("utf-8"),
        "first": _findings(data["findings"]) + _first_screen(data),
        "ranks": _ranks(data),
        "buckets": _buckets(data["buckets"]),
        "rest": _events(data["events"]) + _contract(data["contract"]) + _predicted(data["predicted"]),
        "json": _json(data),
        # One function, so that the scripts share their names with each other and with nothing else.
        "js": f'"use strict";\n(() => {{\n{scripts}}})();\n',
    }
    # In one pass, so that a text of the report cannot be taken for a place.
    return _PLACE.sub(lambda place: filled[place[1]], (assets / "page.html").read_text("utf-8"))


def _json(data: Mapping[str, Any]) -> str:
    r"""Return the data as JSON that can stand inside of a script element.

    Examples:
        >>> print(_json({"a": "</script><!-- \u2028"}))
        {"a":"\u003c/script\u003e\u003c!-- \u2028"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _text(value: object) -> str:
    return value if isinstance(value, _Markup) else html.escape(str(value))


def _sentence(text: str) -> str:
    """Return a sentence as HTML that breaks no line between a number and its unit."""
    return _NUMBER.sub(r'<span class="whole">\g<0></span>', _text(text))


def _time(microseconds: float) -> str:
    """Return a time with three digits.

    Examples:
        >>> _time(469), _time(5380), _time(23208), _time(45_000_000)
        ('0.47 ms', '5.38 ms', '23.2 ms', '45.0 s')
    """
    value, unit = (microseconds / 1e6, "s") if microseconds >= 1e7 else (microseconds / 1e3, "ms")
    return f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f} {unit}"


def _section(name: str, title: str, *content: str, css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return (
        f'<section id="{name}"{kind} aria-labelledby="{name}-title">\n<h2 id="{name}-title">{_text(title)}</h2>\n'
        + "\n".join(content)
        + "\n</section>\n"
    )


def _table(
    name: str,
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    has_numbers: bool = True,
) -> str:
    """Return a table. If it has numbers, cells that begin with a digit are numbers, and stay on one line."""
    body = []
    for first, *cells in rows:
        columns = [f'<th scope="row">{_text(first)}</th>']
        for cell in cells:
            is_number = has_numbers and _text(cell)[:1].isdigit()
            columns.append(f"<td{' class=number' if is_number else ''}>{_text(cell)}</td>")
        body.append(f"<tr>{''.join(columns)}</tr>")
    head = "".join(f'<th scope="col">{_text(one)}</th>' for one in heads)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(title)}">\n<table id="{name}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody></table>\n</div>"
    )


def _findings(findings: Sequence[Mapping[str, str]]) -> str:
    items = []
    for nth, one in enumerate(findings):
        kind = one["kind"]
        more = "".join(
            f'<p class="{name}">{_sentence(one[name])}</p>' for name in ("detail", "cure") if one[name]
        )
        items.append(
            f'<li class="finding {kind}" data-kind="{kind}"><span class="kind">{kind.capitalize()}</span>'
            f'<h3 id="finding-{nth}">{_sentence(one["headline"])}</h3>{more}</li>'
        )
    return f'<section id="findings" aria-label="Findings">\n<ol>{"".join(items)}</ol>\n</section>\n'


def _first_screen(data: Mapping[str, Any]) -> str:
    """Return the figures of the run, and the parts of a step as a bar with a list beneath it."""
    facts = "".join(
        f'<div class="fact" data-fact="{_text(one["name"])}"><dt>{_text(one["name"])}</dt>'
        f"<dd>{_text(one['value'])}</dd><dd class=hint>{_text(one['hint'])}</dd></div>"
        for one in data["facts"]
    )
    parts = data["parts"]
    content = [f'<dl class="facts">{facts}</dl>'] if facts else []
    if parts:
        bar = "".join(
            f'<span class="part fill-{_text(one["part"])}" style="flex-grow:{one["share"] * 1000:.2f}">'
            f"<i></i><b>{_text(one['part'])}</b></span>"
            for one in parts
        )
        rows = "".join(
            f'<li data-part="{_text(one["part"])}"><span class="swatch fill-{_text(one["part"])}"></span>'
            f"{_text(one['words'])} <b>{_time(one['us'])}</b> <span class=quiet>{_percent(one['share'])}</span></li>"
            for one in parts
        )
        content.append(
            f'<h2>Where the time of a step goes (means)</h2>\n<div class="bar" aria-hidden="true">{bar}</div>'
            f'<ul class="legend" id="parts" aria-label="The parts of a step">{rows}</ul>'
        )
    joined = "\n".join(content)
    return f'<section id="overview" aria-label="Overview">\n{joined}\n</section>\n' if content else ""


def _percent(share: float) -> str:
    """Return a share as a percentage.

    Examples:
        >>> _percent(0.154), _percent(0.004)
        ('15 %', '0.4 %')
    """
    return f"{100 * share:.{1 if share < 0.0095 else 0}f} %"


def _ranks(data: Mapping[str, Any]) -> str:
    """Return a place for the heat map, and the mean phases of each rank. Phases that take longer are marked."""
    ranks: Mapping[str, Mapping[str, float]] = data["ranks"]
    if not ranks and not data["stragglers"]:
        return ""
    content = []
    if data["stragglers"]:
        content.append(
            '<div id="stragglers-map" hidden><p class="quiet">Each cell shows some steps of one rank for which the '
            "others waited. The letter is the phase in which the rank lost the time. The bar is as high as the wait "
            'was long. <span class="screen">Click a cell to see its worst step, or use <kbd>←</kbd> <kbd>→</kbd> '
            "<kbd>↑</kbd> <kbd>↓</kbd> and <kbd>Enter</kbd>.</span></p>"
            '<div class="frame"><svg id="stragglers-svg" role="application" tabindex="0" '
            'aria-label="The ranks for which the others waited, over time"></svg></div>'
            '<ul class="legend" id="stragglers-legend" aria-label="Legend"></ul></div>'
        )
    if ranks:
        phases = [one for one in PHASES if any(own[one] for own in ranks.values())]
        rows = []
        for rank, own in ranks.items():
            cells: list[object] = [f"rank {rank}"]
            for phase in phases:
                others = [them[phase] for other, them in ranks.items() if other != rank]
                value = own[phase]
                more = value - median(others) if others else 0.0
                if more > _LATE_FROM * sum(own.values()):
                    cells.append(_Markup(f'{_time(value)} <strong class="more">+{_time(more)}</strong>'))
                else:
                    cells.append(_time(value))
            rows.append(cells)
        is_marked = any(isinstance(cell, _Markup) for row in rows for cell in row)
        words = "A plus marks a phase that takes longer than on the other ranks." if is_marked else ""
        content.append(
            f'<div id="phases"><h3>The mean time of each phase</h3><p class="quiet">{words}</p>'
            + _table("ranks-table", "The mean time of each phase", ["rank", *phases], rows)
            + "</div>"
        )
    return _section("stragglers", "Late ranks" if len(ranks) > 1 else "Phases", *content, css="wide")


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    if not buckets:
        return ""
    longest = max(1.0, *(one[key] for one in buckets for key in ("late", "transfer")))

    def exposed(kind: str, value: float) -> _Markup:
        width = 100 * value / longest
        return _Markup(f'{_time(value)}<span class="exposed fill-{kind}" style="width:{width:.1f}%"></span>')

    rows = [
        (
            f"bucket {one['bucket']}",
            format_bytes(one["bytes"]),
            _time(one["sent"]),
            exposed("late", one["late"]),
            exposed("transfer", one["transfer"]),
            "-" if one["waits_for"] is None else f"rank {one['waits_for']}",
            _parameters(one["parameters"]),
        )
        for one in buckets
    ]
    heads = ("bucket", "size", "sent after", "waits for late ranks", "transfer", "sent last by", "parameters")
    return _section(
        "buckets",
        "Buckets",
        '<p class="quiet">Gradients travel in buckets. A bucket is sent when its last gradient is ready, here after '
        "the beginning of the backward. A wait counts only if the rank had nothing else to do. Times are means of all "
        "steps and ranks.</p>",
        _table("buckets-table", "Buckets", heads, rows),
        css="wide",
    )


def _parameters(names: Sequence[str]) -> _Markup:
    """Return the first names, and how many more there are."""
    shown = ", ".join(f"<code>{_text(name)}</code>" for name in names[:_NUM_NAMES])
    more = len(names) - _NUM_NAMES
    return _Markup(f"{shown} and {more:,} more" if more > 0 else shown or "-")


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return ""
    items = "".join(
        f'<li data-step="{_text(one["step"])}" data-kind="{one["kind"]}"><span class="step">step '
        f'{_text(one["step"])}</span> <span class="kind">{_EVENTS.get(one["kind"], one["kind"]).capitalize()}</span> '
        f"<span>{_text(one['words'])}</span></li>"
        for one in events
    )
    title = f"What happened: {format_count(len(events), 'event')}"
    return _section("events", title, f'<ol class="scroll" tabindex="0" aria-label="Events">{items}</ol>')


def _contract(contract: Mapping[str, Any]) -> str:
    rows = contract.get("rows")
    if not rows:
        return ""
    columns = [key for key in _CONTRACT if any(row.get(key) for row in rows)]
    heads = [key.replace("_", " ") for key in columns]
    body = [[row.get(key) or "-" for key in columns] for row in rows]
    return _section(
        "contract",
        "The contract: what is synchronized, when and how",
        f'<p class="quiet">{_text(contract.get("title", ""))}</p>',
        _table("contract-table", "The contract", heads, body, has_numbers=False),
        css="wide",
    )


def _predicted(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    body = [[one["what"], one["predicted"], one["measured"]] for one in rows]
    return _section(
        "predicted",
        "Predicted and measured",
        _table("predicted-table", "Predicted and measured", ["what", "predicted", "measured"], body),
    )
