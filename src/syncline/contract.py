"""The contract of a wrapped module: it says what is synchronized, when and how, and how far replicas can drift apart.

A contract is immutable. It is computed from the plan of the module (`ddp/plan.py`). No code reads its words.
`print(contract)` shows at most 100 columns, and `print(contract.long())` a table with one line for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from syncline.words import MAX_COLUMNS, format_count, one_line, wrapped

_HEADINGS = ("what", "size", "when", "how", "drift allowed", "last done")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a contract. It describes one group of values, such as gradients, buffers or metrics, or one check."""

    what: str
    size: str
    when: str
    how: str
    drift_allowed: str
    last_done: str = ""
    """The last synchronization of the group, in words; empty before the first step."""

    def __repr__(self) -> str:
        return one_line(self, f"{self.what}, {self.when}, {self.how}")


class Rule(NamedTuple):
    """The part of a row that says when and how the tensors are synchronized, and how far they can drift apart."""

    when: str
    how: str | None
    """The way in which the tensors are synchronized; None if nothing is sent."""
    drift_allowed: str


LOCAL_GRADIENTS = Rule("never: they stay local", None, "local values differ")
"""The rule for gradients that are never averaged."""

OWN_OPTIMIZER = Rule("never", "each rank applies its own update and keeps its own state", "unbounded")
"""The rule for optimizers whose state differs between ranks, because replicas drift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules by which a strategy synchronizes, in words, for the contract and the timeline."""

    strategy: str
    """The name and the arguments of the strategy."""
    gradients: Rule | None = LOCAL_GRADIENTS
    """The rule for gradients; None if every backward averages gradients, as under `EveryStep`."""
    parameters: Rule
    buffers_when: str
    """The time at which buffers are synchronized, as in `every 8 steps`."""
    buffers_drift: str
    buffers_how: str = ""
    """The way in which buffers are synchronized; empty if the buffer policy decides it."""
    optimizer: Rule = OWN_OPTIMIZER
    at_step: str
    """A text for the timeline, which says what the strategy does at an optimizer step."""
    reduces: bool = True
    """Whether some backwards average gradients. This has no effect if `gradients` says that nothing is sent."""
    acts_alone: bool = False
    """Whether the strategy does anything in a world of one rank."""
    equal_after_sync: bool = False
    """Whether parameters are equal on all ranks after each parameter sync."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Contract:
    """A table of what is synchronized, when and how, with one row for each group of tensors.

    Examples:
        >>> row = Row(what="buffers", size="none", when="never", how="-", drift_allowed="-")
        >>> print(Contract(title="DistributedDataParallel(Net), 1 rank", rows=(row,)))
        Contract: DistributedDataParallel(Net), 1 rank
        what     size  when   how  drift allowed
        buffers  none  never  -    -
    """

    title: str
    rows: tuple[Row, ...]
    transport: str = ""
    """The kind of the transport: "shm", "gloo", or "nccl" for accelerators."""
    reduction: str = ""
    """How every backward reduces gradients: "all_reduce", "shards", "hook", or the compression as an expression.
    Other values mean that not every backward does."""

    def __str__(self) -> str:
        """Return the contract as lines of at most 100 columns. Long cells take several lines; nothing is left out."""
        title = wrapped(f"Contract: {self.title}")
        lines = [*title, table([_HEADINGS[:5], *(astuple(row)[:5] for row in self.rows)], MAX_COLUMNS)]
        if self._has_evidence:
            lines += ["", _HEADINGS[5], table([(row.what, row.last_done) for row in self.rows], MAX_COLUMNS)]
        return "\n".join(lines)

    def long(self) -> str:
        """Return the contract as a table with one line for each row, however wide."""
        width = 6 if self._has_evidence else 5
        body = table([_HEADINGS[:width], *(astuple(row)[:width] for row in self.rows)])
        return f"Contract: {self.title}\n{body}"

    def __repr__(self) -> str:
        return one_line(self, f"{format_count(len(self.rows), 'row')}, {self.title}")

    @property
    def _has_evidence(self) -> bool:
        return any(row.last_done for row in self.rows)

    def __getitem__(self, what: str) -> Row:
        """Return the row with this name, as in `contract["buffers"]`.

        Raises:
            KeyError: the contract has no such row.
        """
        for row in self.rows:
            if row.what == what:
                return row
        raise KeyError(
            f"expected the name of a row, which is one of {', '.join(row.what for row in self.rows)}; got {what!r}"
        )


def add_evidence(contract: Contract, last_done: Mapping[str, str]) -> Contract:
    """Return a copy of the contract whose rows also show the last synchronization.

    Args:
        contract: the contract.
        last_done: the text about the last synchronization for each row, by the name of the row. A row without an entry
            shows "-".
    """
    rows = tuple(replace(row, last_done=last_done.get(row.what, "-")) for row in contract.rows)
    return replace(contract, rows=rows)


def table(rows: Sequence[Sequence[str]], max_columns: int | None = None) -> str:
    """Format rows of cells as a table, whose columns are left-aligned and two spaces apart.

    Args:
        rows: the cells of each row.
        max_columns: the largest length of a line. The cells of wide columns are then divided into several lines. Pass
            None for one line per row.

    Examples:
        >>> print(table([("what", "when"), ("buffers", "before forward, not after no_sync")], 26))
        what     when
        buffers  before forward,
                 not after no_sync
    """
    columns = [[[cell] for cell in column] for column in zip(*rows, strict=True)]
    if max_columns is not None:
        columns = _narrowed(columns, max_columns - 2 * (len(columns) - 1))
    widths = [_width(column) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        in_lines = zip_longest(*row, fillvalue="")
        lines += ["  ".join(map(str.ljust, line, widths)).rstrip() for line in in_lines]
    return "\n".join(lines)


_Column = list[list[str]]
"""The cells of a column from top to bottom. A cell consists of lines."""


def _width(column: _Column) -> int:
    return max(len(line) for cell in column for line in cell)


def _narrowed(columns: list[_Column], total: int) -> list[_Column]:
    """Return the columns of a table with more lines per cell, so that all columns fit into `total` characters.

    It narrows one column after the other: the one for which the table then has the fewest lines. It keeps the first
    column, and divides no word, as far as they fit.
    """
    texts = [[cell[0] for cell in column] for column in columns]

    @cache
    def at(index: int, limit: int) -> _Column:
        return [wrapped(text, limit, indent="") for text in texts[index]]

    words = [max((len(word) for text in column for word in text.split()), default=1) for column in texts[1:]]
    least = [max(map(len, texts[0])), *words]
    # The largest width of a column so that all columns fit. Narrower columns keep their width.
    limit = max(1, *least)
    while limit > 1 and sum(min(width, limit) for width in least) > total:
        limit -= 1
    columns = [at(index, limit) if width > limit else columns[index] for index, width in enumerate(least)]
    while sum(widths := [_width(column) for column in columns]) > total:
        found = []
        for index, width in enumerate(widths):
            if width > min(least[index], limit):
                changed = [*columns[:index], at(index, width - 1), *columns[index + 1 :]]
                num_lines = sum(max(map(len, row)) for row in zip(*changed, strict=True))
                found.append((num_lines, -width, index))
        index = min(found)[-1]
        columns[index] = at(index, widths[index] - 1)
    return columns
