"""The contract: what is synchronized, when and how, and how much replicas may drift apart between two syncs.

A contract is immutable. It is computed from facts that the ranks have compared (`ddp/plan.py`). No code depends on its
words. `print(contract)` prints the contract as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_HEADINGS = ("what", "size", "when", "how", "drift allowed", "last done")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a contract, for one group of tensors: gradients, parameters, buffers, optimizer state or metrics."""

    what: str
    size: str
    when: str
    how: str
    drift_allowed: str
    last_done: str = ""
    """The last recorded synchronization of the group; empty before the first step."""


class Rule(NamedTuple):
    """The part of a row that says when and how tensors are synchronized."""

    when: str
    how: str | None
    """The way in which tensors are synchronized; None if nothing is sent."""
    drift_allowed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of a strategy in words, for the contract and the timeline."""

    strategy: str
    """The name and the arguments of the strategy."""
    gradients: Rule | None
    """The rule for gradients; None if every backward averages them, as without a strategy."""
    parameters: Rule
    buffers_when: str
    """The time at which buffers are synchronized, as in `every 8 steps`."""
    buffers_drift: str
    buffers_how: str = ""
    """The way in which buffers are synchronized; empty if the buffer policy determines it."""
    optimizer: Rule
    at_step: str
    """The action at an optimizer step, for the timeline."""
    reduces: bool = True
    """Whether any backward averages gradients. This has no effect if `gradients` says that nothing is sent."""
    acts_alone: bool = False
    """Whether the strategy does anything in a world of one rank."""
    equal_after_sync: bool = False
    """Whether parameters are equal on all ranks after each parameter sync."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """A table of what is synchronized, when and how, with one row per group of tensors.

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
        """Return the row of one group of tensors, as in `contract["buffers"]`."""
        for row in self.rows:
            if row.what == what:
                return row
        raise KeyError(
            f"expected the name of a row ({', '.join(row.what for row in self.rows)}), got {what!r}"
        )


def add_evidence(contract: Contract, last_done: Mapping[str, str]) -> Contract:
    """Return a copy of the contract whose rows show what was last done. A row without an entry shows "-"."""
    rows = tuple(replace(row, last_done=last_done.get(row.what, "-")) for row in contract.rows)
    return replace(contract, rows=rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table with left-aligned columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
