"""The contract: what is synchronized, when, how, and how much drift is allowed in between.

A contract is an immutable value made from the arguments. All ranks agree on its lines before the first byte is
sent; `print(contract)` shows it as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["Contract", "Row", "Rule", "Rules", "add_evidence", "compared_lines", "table"]


_HEADINGS = ("what", "size", "when", "how", "drift allowed", "last done")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One group of tensors: gradients, parameters, buffers, optimizer state, metrics."""

    what: str
    size: str
    when: str
    how: str
    drift_allowed: str
    last_done: str = ""
    """What was recorded of it; empty before the first step."""


class Rule(NamedTuple):
    """What a strategy says of one row."""

    when: str
    how: str
    drift_allowed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a strategy promises, in words, for the contract and the timeline."""

    strategy: str
    """Its name and arguments."""
    gradients: Rule | None
    """None: as in synchronous training."""
    parameters: Rule
    buffers_when: str
    buffers_drift: str
    buffers_how: str = ""
    """Empty: by the policy for buffers."""
    optimizer: Rule
    at_step: str
    reduces: bool = True
    """Whether any backward averages gradients, as far as `gradients` leaves that open."""
    acts_alone: bool = False
    """Whether it does something where there is one rank."""
    meets_equal: bool = False
    """Whether parameters are equal on all ranks after each meeting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What is synchronized, when and how, a row for each group of tensors.

    Example:
        >>> row = Row(what="buffers", size="none", when="never", how="-", drift_allowed="-")
        >>> print(Contract(title="DistributedDataParallel(Net), 1 rank", rows=(row,)))
        Contract: DistributedDataParallel(Net), 1 rank
        what     size  when   how  drift allowed
        buffers  none  never  -    -
    """

    title: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        cells = [
            (row.what, row.size, row.when, row.how, row.drift_allowed, row.last_done) for row in self.rows
        ]
        width = 6 if any(row.last_done for row in self.rows) else 5
        body = table([_HEADINGS[:width], *(row[:width] for row in cells)])
        return f"Contract: {self.title}\n{body}"

    def __getitem__(self, what: str) -> Row:
        """The row for `what`, say `contract["buffers"]`."""
        for row in self.rows:
            if row.what == what:
                return row
        raise KeyError(f"expected one of {', '.join(row.what for row in self.rows)}; got {what!r}")


def compared_lines(contract: Contract) -> list[str]:
    """Return a line per row for ranks to compare: the rules, neither sizes nor what was recorded."""
    return [f"{r.what}: {r.when}; {r.how}; drift allowed: {r.drift_allowed}" for r in contract.rows]


def add_evidence(contract: Contract, last_done: Mapping[str, str]) -> Contract:
    """Return the same contract, with what was last done about each row."""
    rows = tuple(replace(row, last_done=last_done.get(row.what, "-")) for row in contract.rows)
    return replace(contract, rows=rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
