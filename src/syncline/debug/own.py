"""What ranks have found in their own runs, put together: what several have found alike is said once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.debug.report import Finding
from syncline.plan.difference import describe_ranks, ranks_with

__all__ = ["OwnFinding", "put_together"]


@dataclass(frozen=True, kw_only=True)
class OwnFinding:
    """What one rank tells the others; as `Finding`, but for these."""

    module: str
    kind: str
    what: str
    """What differs, without who found it and how much."""
    difference: str = ""
    """How much, of this rank's own data; "" where that is not known."""
    causes: tuple[str, ...] = ()


def put_together(told: Sequence[Sequence[OwnFinding]]) -> list[Finding]:
    """The findings of all ranks, in the order in which ranks and findings occur.

    Args:
        told: of each rank, in rank order.

    Example:
        >>> noise = OwnFinding(module="mix", kind="Mix", what="two runs: mix differs", difference="1 of 4 elements")
        >>> print(*put_together([[noise], [], [noise]]))
        ranks 0, 2, two runs: mix differs: 1 of 4 elements
    """
    differences: dict[tuple[str, str, str, tuple[str, ...]], dict[int, str]] = {}
    for rank, findings in enumerate(told):
        for one in findings:
            alike = (one.module, one.kind, one.what, one.causes)
            differences.setdefault(alike, {}).setdefault(rank, one.difference)
    return [
        Finding(
            ranks=tuple(by_rank),
            module=module,
            kind=kind,
            what=f"{describe_ranks(list(by_rank))}, {what}{_how_much(by_rank)}",
            causes=causes,
        )
        for (module, kind, what, causes), by_rank in differences.items()
    ]


def _how_much(by_rank: dict[int, str]) -> str:
    """Ranks have data of their own: of several that differ, the first that is known is shown, as that of its rank."""
    known = ranks_with({rank: difference for rank, difference in by_rank.items() if difference})
    if not known:
        return ""
    (first, ranks), *_ = known.items()
    return f": {first}" if len(ranks) == len(by_rank) else f"; on {describe_ranks(ranks)}: {first}"
