"""The report of rank 0 for `syncline explain`, its text, and the picture of a step in characters (pure functions).

The picture has a row for each phase and each bucket, with bars on one axis of time. The report travels as JSON, so that
the command itself needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from syncline.words import format_count, format_time, wrapped

Kind = Literal["buffers", "forward", "backward", "bucket", "wait", "optimizer", "round", "call"]


class Row(NamedTuple):
    """One row of the picture. Times are in seconds since the step began."""

    kind: Kind
    label: str
    spans: Sequence[tuple[float, float]]
    """Pairs of a begin and an end, in order of time."""
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


MOST_STEPS = 100
"""Without `--step`, a script whose ranks send nothing in a step runs up to this step, until they do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that the command passes to the ranks."""

    num_ranks: int
    step: int | None
    """The step to show; None for the first one that shows what is usual, see `Options.is_enough`."""
    report: str
    """The path of the file to which rank 0 writes the report."""

    def is_enough(self, step: int, *, meets_others: bool) -> bool:
        """Return whether the script can end after this step.

        Args:
            step: the number of the step, from 1.
            meets_others: whether this rank sent gradients or parameters in the step.

        Examples:
            >>> options = Options(num_ranks=2, step=None, report="")
            >>> options.is_enough(2, meets_others=True), options.is_enough(3, meets_others=True)
            (False, True)
            >>> options.is_enough(3, meets_others=False), options.is_enough(100, meets_others=False)
            (False, True)
        """
        if self.step:
            return step >= self.step
        return step >= SETTLED_STEP and (meets_others or self.num_ranks == 1 or step >= MOST_STEPS)


SETTLED_STEP = 3
"""The first step with final buckets and usual times: buckets are laid out again after the first step, and the first
steps allocate memory."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The last complete step of a script."""

    step: int
    """The number of complete steps; 0 if there was none. The other fields are empty then."""
    num_ranks: int = 1
    seconds: float = 0.0
    modules: Sequence[str] = ()
    """The contract and the timeline of each wrapped module in the step."""
    rows: Sequence[Row] = ()
    meets_others: bool = False
    uses_torch_class: bool = False
    """Whether the script has a module in torch's own DistributedDataParallel."""

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Report:
        """Return the report that `encode` has returned as JSON.

        Examples:
            >>> Report.decode(Report(step=0).encode()).step
            0
        """
        found = json.loads(text)
        return Report(**{**found, "rows": [Row(*one) for one in found["rows"]]})


def text_of(report: Report, options: Options, style: Style) -> str:
    """Return the text that the command prints about a step: contract, timeline, picture and notes."""
    parts = [*report.modules]
    length = format_time(report.seconds)
    heading = f"Step {report.step} on rank 0, {length} from its first forward to its last work"
    parts.append("\n".join([heading, *picture(report.rows, report.seconds, style), legend(style)]))
    parts.append("\n".join(line for note in _notes(report, options) for line in wrapped(note)))
    return "\n\n".join(parts)


def _notes(report: Report, options: Options) -> list[str]:
    notes = []
    if report.num_ranks > 1:
        notes.append(
            f"The {report.num_ranks} ranks shared this host, so the waits are not those of a cluster: `syncline plan` "
            "predicts them. `syncline run --trace DIR` and `syncline report DIR` show the waits of a whole run."
        )
    if options.step and report.step < options.step:
        notes.append(
            f"The script ended after {format_count(report.step, 'step')}, before step {options.step}."
        )
    elif not options.step and report.num_ranks > 1 and not report.meets_others:
        notes.append(
            f"Up to step {report.step}, the ranks sent neither gradients nor parameters. --step N shows a later step; "
            "the timeline says when the next round comes, if that is known."
        )
    return notes


def nothing_shown(report: Report, program: str) -> str:
    """Return why no step can be shown, and what to do."""
    if report.uses_torch_class:
        remedy = (
            "It uses torch.nn.parallel.DistributedDataParallel: replace this class by sl.DistributedDataParallel, "
            "which takes the same arguments"
        )
    else:
        remedy = (
            "A step is a forward and a backward of an sl.DistributedDataParallel in training mode. Wrap the module, "
            "and check that the script trains when it is started like this. Processes that the script starts, and "
            "steps of an sl.EvolutionStrategy, cannot be shown"
        )
    return f"{program} ended, and no step of a wrapped module was complete, so there is nothing to show. {remedy}"


# ---------------------------------------------------------------------- the picture


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
