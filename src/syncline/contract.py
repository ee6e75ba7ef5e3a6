"""The contract of a wrapped module: it says what is synchronized, when and how, and how far replicas can drift apart.

A contract is immutable. It is computed from the plan of the module (`ddp/plan.py`). No code reads its words.
`print(contract)` prints the contract as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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


class Rule(NamedTuple):
    """The part of a row that says when and how the tensors are synchronized, and how far they can drift apart."""

    when: str
    how: str | None
    """The way in which the tensors are synchronized; None if nothing is sent."""
    drift_allowed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules by which a strategy synchronizes, in words, for the contract and the timeline."""

    strategy: str
    """The name and the arguments of the strategy."""
    gradients: Rule | None
    """The rule for gradients; None if every backward averages gradients, as under `EveryStep`."""
    parameters: Rule
    buffers_when: str
    """The time at which buffers are synchronized, as in `every 8 steps`."""
    buffers_drift: str
    buffers_how: str = ""
    """The way in which buffers are synchronized; empty if the buffer policy decides it."""
    optimizer: Rule
    at_step: str
    """A text for the timeline, which says what the strategy does at an optimizer step."""
    reduces: bool = True
    """Whether some backwards average gradients. This has no effect if `gradients` says that nothing is sent."""
    acts_alone: bool = False
    """Whether the strategy does anything in a world of one rank."""
    equal_after_sync: bool = False
    """Whether parameters are equal on all ranks after each parameter sync."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """A table of what is synchronized, when and how, with one row for each group of tensors.

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


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as a table, whose columns are left-aligned and two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
