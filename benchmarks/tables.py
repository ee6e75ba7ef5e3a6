"""Functions that format sizes, times, processors and tables as text (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def size_text(size_bytes: int) -> str:
    """Format a number of bytes as a size in the format of `parse_size`, rounded to 4 digits.

    Examples:
        >>> size_text(65536), size_text(25 * 2**20), size_text(400)
        ('64 KiB', '25 MiB', '400 B')
    """
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}iB"
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
    return f"{machine['num_cores']} cores of {machine['cpu']} ({machine['architecture']})"


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


def _three_digits(number: float) -> str:
    if abs(number) < 0.0995:
        return f"{number:.1g}"
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
