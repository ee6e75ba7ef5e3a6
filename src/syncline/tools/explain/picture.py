"""The picture of a step, in characters: a row for each phase and each bucket, with bars on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from syncline.words import format_time

Kind = Literal["buffers", "forward", "backward", "bucket", "wait", "optimizer", "round", "call"]


class Row(NamedTuple):
    """One row of the picture. Times are in seconds since the step began."""

    kind: Kind
    label: str
    spans: Sequence[tuple[float, float]]
    """When it began and ended, in order of time."""
    note: str = ""
    """A text behind the bars."""
    detail: str = ""
    """A text behind the label, which is shortened if there is no place."""


class Style(NamedTuple):
    """How a picture is drawn."""

    columns: int = 100
    """The largest length of a line."""
    has_blocks: bool = True
    """Whether blocks and arrows can be printed; otherwise ASCII is used."""
    has_colours: bool = False


_COLOURS: dict[Kind, int] = {
    "buffers": 36,
    "forward": 34,
    "backward": 35,
    "bucket": 33,
    "wait": 31,
    "optimizer": 32,
    "round": 36,
    "call": 36,
}
"""The number of the colour of each kind, as terminals know it."""

_SHORTEST_AXIS = 20

_MOST_LABEL_SHARE = 0.45


def picture(rows: Sequence[Row], seconds: float, style: Style) -> list[str]:
    """Return the lines of the picture of one step.

    Args:
        rows: the rows, from top to bottom.
        seconds: the length of the step.
        style: how it is drawn.

    Examples:
        >>> rows = [Row("forward", "forward", [(0.0, 0.004)], "4.0 ms"), Row("bucket", "bucket 0", [(0.004, 0.008)])]
        >>> print(*picture(rows, 0.008, Style(columns=40, has_blocks=False)), sep="\\n")
                  0               8.0 ms
        forward   ###########             4.0 ms
        bucket 0             ..........>
    """
    note_width = max((len(row.note) for row in rows), default=0)
    least = max((len(row.label) for row in rows), default=0)
    wanted = max((len(_whole(row)) for row in rows), default=0)
    most = max(least, int(_MOST_LABEL_SHARE * style.columns))
    label_width = min(wanted, most, max(8, style.columns - note_width - 4 - _SHORTEST_AXIS))
    axis = max(_SHORTEST_AXIS, style.columns - label_width - note_width - 4)
    end = format_time(seconds)
    lines = [" " * (label_width + 2) + "0" + end.rjust(axis - 1)]
    for row in rows:
        label = _shortened(_whole(row), label_width, style).ljust(label_width)
        bar = _coloured(_bar(row, seconds, axis, style), row.kind, style)
        lines.append(f"{label}  {bar}  {row.note}".rstrip())
    return lines


def _whole(row: Row) -> str:
    return f"{row.label}  {row.detail}" if row.detail else row.label


def _shortened(text: str, width: int, style: Style) -> str:
    if len(text) <= width:
        return text
    end = "…" if style.has_blocks else "..."
    return text[: max(0, width - len(end))] + end


def _bar(row: Row, seconds: float, width: int, style: Style) -> str:
    """Return the bars of a row, `width` characters long. A span takes one character at least."""
    filled, growing, sent = ("█", "░", "▶") if style.has_blocks else ("#", ".", ">")
    cells = [" "] * width
    for began, ended in row.spans:
        first = _cell(began, seconds, width)
        last = max(first, _cell(ended, seconds, width, is_end=True))
        is_bucket = row.kind == "bucket"
        cells[first : last + 1] = (growing if is_bucket else filled) * (last - first + 1)
        if is_bucket:
            cells[last] = sent
    return "".join(cells)


def _cell(at: float, seconds: float, width: int, *, is_end: bool = False) -> int:
    place = width * min(1.0, max(0.0, at / seconds)) if seconds > 0 else 0.0
    # A span that ends where a cell begins does not reach into this cell.
    return min(width - 1, max(0, round(place) - is_end))


def _coloured(bar: str, kind: Kind, style: Style) -> str:
    return f"\x1b[{_COLOURS[kind]}m{bar}\x1b[0m" if style.has_colours and bar.strip() else bar


def legend(style: Style) -> str:
    """Return the line that says what the signs mean."""
    filled, growing, sent = ("█", "░", "▶") if style.has_blocks else ("#", ".", ">")
    return f"{filled} at work   {growing} gradients of a bucket become ready   {sent} the bucket is sent"
