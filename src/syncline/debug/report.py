"""What was found, as data and as a text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from syncline.errors import SynclineError
from syncline.plan.difference import describe_ranks, ranks_with

__all__ = ["Disagreement", "Finding", "Report", "by_value"]

_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One disagreement."""

    ranks: tuple[int, ...]
    """On which it was found; of one between ranks, those that are not of the largest group of equal ones."""
    module: str
    """Qualified name of the module that is to blame; "" where none is, or where it is the outermost."""
    kind: str
    """Its class; "" where none is to blame."""
    what: str
    """What differs, and how much."""
    causes: tuple[str, ...] = ()
    """What was seen that explains it, the strongest evidence first; each with what to do."""

    def __str__(self) -> str:
        return "\n".join([_wrapped(self.what, ""), *(_wrapped(cause, "- ") for cause in self.causes)])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was checked and what came of it; the same on all ranks. `print(report)` shows it."""

    title: str
    num_ranks: int
    checked: tuple[str, ...]
    """What was computed and compared."""
    findings: tuple[Finding, ...] = ()
    """Disagreements: those within ranks, then those between them."""
    notes: tuple[str, ...] = ()
    """What is worth knowing, and no disagreement."""
    facts: tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    """What each rank computes with, in rank order."""

    @property
    def agrees(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def __str__(self) -> str:
        num = len(self.findings)
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        verdict = f"{num} disagreement{'s' if num > 1 else ''}" if num else "all agrees"
        lines = [f"{self.title}: {ranks}, {verdict}"]
        for number, finding in enumerate(self.findings, 1):
            lines.append(_indented(str(finding), f"{number}. "))
        lines += ["checked", *(_wrapped(one, "  - ") for one in self.checked)]
        if self.notes:
            lines += ["notes", *(_wrapped(one, "  - ") for one in self.notes)]
        return "\n".join([*lines, *self._facts()])

    def _facts(self) -> list[str]:
        """What the ranks compute with: in one line what they have in common, in one each what they have not."""
        if not self.facts:
            return []
        names = dict.fromkeys(name for row in self.facts for name in row)
        values = {name: [row.get(name, "none") for row in self.facts] for name in names}
        common = [f"{name} {own[0]}" for name, own in values.items() if len(set(own)) == 1]
        apart = [f"{name}: {by_value(own)}" for name, own in values.items() if len(set(own)) > 1]
        return ["ranks", *(_wrapped(one, "  - ") for one in ["; ".join(common), *apart] if one)]


class Disagreement(SynclineError):
    """What was computed twice, or on two ranks, is not the same. The same text on every rank.

    Attributes:
        report: all that was found.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def by_value(values: Sequence[str]) -> str:
    """What each rank has, in words.

    Example:
        >>> by_value(["1", "1"]), by_value(["1", "2"])
        ('1', '1 (rank 0), 2 (rank 1)')
    """
    ranks = ranks_with(dict(enumerate(values)))
    if len(ranks) == 1:
        return values[0]
    return ", ".join(f"{value} ({describe_ranks(held)})" for value, held in ranks.items())


def _wrapped(text: str, mark: str) -> str:
    return "\n".join(
        textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=mark,
            subsequent_indent=" " * len(mark),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _indented(text: str, mark: str) -> str:
    return mark + text.replace("\n", "\n" + " " * len(mark))
