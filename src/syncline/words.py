"""Formatting of sizes, counts and lists of names in all printed text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "format_count", "format_names"]


def format_bytes(num_bytes: int) -> str:
    """Format a size with three digits and a decimal unit, as in `421 kB`.

    Example:
        >>> format_bytes(0), format_bytes(1234), format_bytes(421_000), format_bytes(76_800_000)
        ('0 B', '1.23 kB', '421 kB', '76.8 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun, as in `1 tensor`, `8 tensors` or `1,234 tensors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_names(names: Sequence[str], num_shown: int = 4, *, noun: str = "parameters") -> str:
    """Join the names. If there are more than `num_shown`, name the first ones and the last, and give the count.

    Example:
        >>> format_names(["a", "b"]), format_names(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c, ..., e (5 parameters)')
    """
    if len(names) <= num_shown:
        return ", ".join(names)
    return ", ".join([*names[: num_shown - 1], "...", names[-1]]) + f" ({len(names)} {noun})"
