"""Functions that format sizes, times and the report of a measurement as text, and that parse sizes.

All functions are pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.words import MAX_COLUMNS, wrapped

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


def size_text(size_bytes: int) -> str:
    """Format a number of bytes as a size in the format of `parse_size`, rounded to 4 digits.

    Examples:
        >>> size_text(65536), size_text(25 * 2**20), size_text(400)
        ('64 KiB', '25 MiB', '400 B')
    """
    for unit in "GMK":
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.4g} {unit}iB"
    return f"{size_bytes} B"


def seconds_text(seconds: float) -> str:
    """Format a time with three significant digits and a unit.

    Examples:
        >>> seconds_text(2.345e-6), seconds_text(0.0139), seconds_text(1.5)
        ('2.35 us', '13.9 ms', '1.50 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def processor_text(machine: Mapping[str, Any]) -> str:
    """Format the processor of a machine, and the number of its cores that the ranks may use.

    Args:
        machine: the result of `machine.describe_machine`.
    """
    return f"{machine['num_cores']} cores of {machine['cpu'] or 'an unnamed CPU'} ({machine['architecture']})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as a table whose columns are two spaces apart.

    The first column is left-aligned. The other columns are right-aligned.

    Examples:
        >>> print(table([["size", "a"], ["1 KiB", "2 us"]]))
        size      a
        1 KiB  2 us
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def report(summary: Mapping[str, Any]) -> str:
    """Format the whole measurement as the text that `syncline bench` prints.

    Args:
        summary: the result of `timing.summarize`.
    """
    parts = [_head(summary)]
    for title, figure, form in _FIGURES:
        rows = _by_size(summary["all_reduce"], figure, form)
        if rows:
            parts.append(f"{title}\n{rows}")
    parts += [_steps(row) for row in summary["steps"]]
    if summary["notes"]:
        parts.append("\n".join(["Not measured", *(f"  {note}" for note in summary["notes"])]))
    return "\n\n".join(
        "\n".join(short for line in part.splitlines() for short in wrapped(line)) for part in parts
    )


def _head(summary: Mapping[str, Any]) -> str:
    machine, num_ranks, plan = summary["machine"], summary["num_ranks"], summary["plan"]
    cores = machine["num_cores"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "syncline"))
    lines = [
        f"{num_ranks} ranks x 1 thread on {processor_text(machine)}, load {machine['load']:.2f}",
        f"{versions} over {summary['transport']}, Python {machine['python']}, {machine['system']}",
        f"medians over {plan['num_rounds']} rounds in which the engines take turns, on the slowest rank",
    ]
    if num_ranks > cores:
        lines.append(
            f"more ranks than cores: {num_ranks} ranks share {cores} cores, so times include waiting for a core"
        )
    if machine["load"] > 0.5 * cores:
        lines.append("the machine was not idle when the benchmark started: expect wide intervals")
    if "shared memory" not in summary["transport"]:
        lines.append("these ranks share no memory, so syncline used the transport named above")
    return "\n".join(lines)


def _by_size(rows: Sequence[Mapping[str, Any]], figure: str, form: Callable[[Any], str]) -> str:
    """Format one quantity of all_reduce as a table with one line per engine and one column per size.

    If the columns are too wide for one table, they are divided among several tables. Engines without this quantity are
    left out.

    Args:
        rows: the results of all_reduce, one for each size.
        figure: the key of the quantity in the results of an engine.
        form: a function that formats a value of the quantity.
    """
    engines = dict.fromkeys(name for row in rows for name in row["engines"])
    names = [name for name in engines if any(figure in row["engines"].get(name, {}) for row in rows)]
    if not names:
        return ""
    columns = [
        [size_text(row["payload_bytes"]), *(form(row["engines"][name][figure]) for name in names)]
        for row in rows
    ]
    width = sum(max(map(len, column)) + 2 for column in columns)
    room = MAX_COLUMNS - 2 - max(map(len, names)) - 2
    num_columns = math.ceil(len(columns) / math.ceil(width / room))
    parts = [columns[at : at + num_columns] for at in range(0, len(columns), num_columns)]
    return "\n".join(_indented(table(list(zip(["", *names], *part, strict=True)))) for part in parts)


def _steps(row: Mapping[str, Any]) -> str:
    rival = row["rival"]
    title = (
        f"{row['model']} ({row['num_parameters'] / 1e6:.2f} M parameters), forward, backward, fused AdamW\n"
        f"  ratio: time / time of {rival}, the fastest step over Gloo\n"
        "  exposed: the extra time of synchronization, relative to a step that is not synchronized"
    )
    body = [
        [
            name,
            seconds_text(figures["median_seconds"]),
            _interval_text(figures["ratio"]),
            _percent_text(figures["exposed"]) if "exposed" in figures else "-",
        ]
        for name, figures in row["competitors"].items()
    ]
    return f"{title}\n" + _indented(table([["step", "time", "ratio", "exposed"], *body]))


def _interval_text(found: Mapping[str, float]) -> str:
    middle, low, high = (_three_digits(found[name]) for name in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]"


def _percent_text(found: Mapping[str, float]) -> str:
    return f"{found['median']:.0%} [{found['low']:.0%}, {found['high']:.0%}]"


def _three_digits(number: float) -> str:
    if abs(number) < 0.0995:
        return f"{number:.1g}"
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("all_reduce, mean of fp32: time of a call", "median_seconds", seconds_text),
    (
        "Payload bytes / time, GB/s (copy: each rank copies a tensor of this size)",
        "payload_bytes_per_second",
        lambda bytes_per_second: _three_digits(bytes_per_second / 1e9),
    ),
    ("Times as fast as Gloo [95 % interval]", "times_as_fast_as_gloo", _interval_text),
    ("Speed relative to the copy, which moves as many bytes", "share_of_copy", _percent_text),
)
"""The tables of all_reduce. Each has a title, the key of the quantity that it shows, and a function that formats it."""
