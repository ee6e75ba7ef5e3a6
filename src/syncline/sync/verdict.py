"""What all ranks make of what each told with its gradients: nothing, or the same error everywhere.

Each rank's part is in `control.py`. Ranks decode the same sum, so they come to the same verdict, and only where
something is wrong do they exchange details.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from syncline.errors import ContractMismatch, SynclineError, UnreducedGradients
from syncline.plan.difference import describe_difference, describe_ranks
from syncline.sync.control import RankControl
from syncline.transport.base import Transport

__all__ = ["pass_verdict", "pass_verdict_alone"]


def pass_verdict(
    ranks: Sequence[RankControl],
    transport: Transport,
    *,
    step: int,
    names: Sequence[str],
    missing: Callable[[], frozenset[int]],
    changed: Callable[[], list[tuple[int, int, int]]],
    facts: Callable[[], list[str]],
) -> None:
    """Raise, on every rank alike, what is wrong on any rank.

    Args:
        ranks: what each told.
        transport: for the details.
        step: the step under way.
        names: of all parameters.
        missing: indices of this rank's parameters without a gradient.
        changed: this rank's parameters whose number of gradients is not what was learnt, see `StaticUsage.changed`.
        facts: this rank's, see `StepGuard.facts`.

    Raises:
        UnreducedGradients: gradients are missing.
        ContractMismatch: attached optimizers differ, or a graph that was said to be static has changed.
        SynclineError: some ranks ran under `normalize_by` and others did not.
    """
    mine = ranks[transport.rank]
    active = [rank for rank, control in enumerate(ranks) if not control.joined]
    if len({ranks[rank].fingerprint for rank in active}) > 1:
        told = _exchange([] if mine.joined else facts(), transport)
        raise _disagreement({rank: told[rank] for rank in active}, transport.size, step)
    if any(control.gradients_missing for control in ranks):
        told = _exchange([] if mine.joined else [names[i] for i in sorted(missing())], transport)
        raise UnreducedGradients(
            {rank: row for rank, row in enumerate(told) if row},
            step=step,
            num_parameters=len(names),
            num_ranks=transport.size,
        )
    if any(control.graph_changed for control in ranks):
        lines = _in_words(changed(), names)
        raise _changed_graph(_exchange(lines if mine.graph_changed else [], transport), step)
    counted = [rank for rank in active if ranks[rank].num_items is not None]
    if counted and len(counted) != len(active):
        others = sorted(set(active) - set(counted))
        raise SynclineError(
            f"step {step}: {describe_ranks(counted)} ran this backward under normalize_by, {describe_ranks(others)} "
            "did not: the gradients have no common divisor. Use normalize_by on all ranks (0 items is fine) or on "
            "none, then zero the gradients"
        )


def pass_verdict_alone(
    missing: Sequence[str],
    changed: Sequence[tuple[int, int, int]],
    *,
    rank: int,
    num_ranks: int,
    step: int,
    names: Sequence[str],
) -> None:
    """The same of one rank alone: there is one, or gradients are not reduced in this backward.

    Args:
        missing: names of the parameters without a gradient that should have one.
        changed: see `StaticUsage.changed`.
        rank: this one.
        num_ranks: how many there are.
        step: the step under way.
        names: of all parameters.
    """
    if missing:
        raise UnreducedGradients({rank: missing}, step=step, num_parameters=len(names), num_ranks=num_ranks)
    if changed:
        told: list[list[str]] = [[] for _ in range(num_ranks)]
        told[rank] = _in_words(changed, names)
        raise _changed_graph(told, step)


def _in_words(changed: Sequence[tuple[int, int, int]], names: Sequence[str]) -> list[str]:
    return [f"{names[i]} ({learnt} before, {got} now)" for i, learnt, got in changed]


def _exchange(mine: Sequence[str], transport: Transport) -> list[list[str]]:
    return [json.loads(row) for row in transport.all_gather_bytes(json.dumps(list(mine)).encode())]


def _changed_graph(told: Sequence[Sequence[str]], step: int) -> ContractMismatch:
    lines = [
        f"  rank {rank}: {', '.join(row[:5])}" + (f", ... ({len(row)} parameters)" if len(row) > 5 else "")
        for rank, row in enumerate(told)
        if row
    ]
    return ContractMismatch(
        f"step {step}, backward: static_graph=True, but the number of gradients of a parameter in one backward "
        "changed:\n" + "\n".join(lines) + "\n"
        "Nothing may be stepped with these gradients. Leave static_graph out, or run the same graph in every step"
    )


def _disagreement(facts: dict[int, list[str]], num_ranks: int, step: int) -> SynclineError:
    """Return the error for ranks whose attached optimizers differ."""
    shown = [facts.get(rank, ["joined: no inputs left"]) for rank in range(num_ranks)]
    return ContractMismatch(
        describe_difference(
            f"step {step}, backward: the attached optimizers",
            shown,
            remedy="Give all ranks the same settings (a scheduler stepped on one rank only?), and step the optimizer "
            "as often on each. sl.broadcast_(optimizer) makes them rank 0's.",
        )
    )
