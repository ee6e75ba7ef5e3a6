"""What all ranks make of what each told with its gradients: nothing, or the same error everywhere.

Each rank's part is in `control.py`. Ranks decode the same sum, so they come to the same verdict, and only where
something is wrong do they exchange details.

What has put the ranks out of step: said once with all that is known, and again to whoever goes on regardless.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from syncline.differences import describe_difference, describe_ranks
from syncline.errors import ContractMismatch, SynclineError, UnreducedGradients
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.tail import RankControl
from syncline.transport.base import Transport

__all__ = ["Trouble", "pass_verdict", "pass_verdict_alone"]


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


_CHECKPOINTING = "torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True"


class Trouble:
    """The first error after which one rank has sent what another has not.

    Args:
        rank: this rank.
        names: of all parameters.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.text: str | None = None
        """The error; None while all is well."""
        self._rank = rank
        self._names = names

    def raise_again(self) -> None:
        """Raise the error, if there is one."""
        if self.text is not None:
            raise SynclineError(self.text)

    def add_place(self, error: Exception, step: int, bucket: BucketPlan) -> None:
        """Say in `error` which rank, step, phase and parameters it hit.

        The same exception goes on, so that a user sees one traceback.
        """
        names = [self._names[i] for i in bucket.parameters]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} parameters)" if len(names) > 3 else "")
        place = f"rank {self._rank}, step {step}, backward, bucket {bucket.index} ({shown})"
        self.text = f"{place}: {error}"
        if isinstance(error, SynclineError):
            error.args = (self.text,)
        else:  # a user's hook raised: its error is his
            error.add_note(f"at {place}")

    # The errors that follow are returned, to be raised.

    def too_late(self, step: int) -> SynclineError:
        """The backward was taken for ended inside of another one, and a gradient came after all."""
        return self._error(
            step,
            "a gradient came after all parameters had theirs and were reduced, from another re-entrant checkpoint of "
            f"the same backward. Use {_CHECKPOINTING}",
        )

    def from_outside(self, step: int, index: int) -> SynclineError:
        """A parameter that the graph would not reach got a gradient."""
        return self._error(
            step,
            f"{self._names[index]} received a gradient from outside of the graph that this backward began with. With "
            f"activation checkpointing use {_CHECKPOINTING}",
        )

    def twice(self, step: int, indices: Sequence[int]) -> SynclineError:
        """Parameters got two gradients in one backward."""
        names = ", ".join(sorted(self._names[index] for index in indices))
        return self._error(
            step,
            f"{names} received a gradient more than once in one backward, the second time after it may have been sent. "
            f"With activation checkpointing use {_CHECKPOINTING}",
        )

    def interrupted(self, step: int, num_sent: int) -> SynclineError:
        """A backward began though the one before had sent something and not ended."""
        return self._error(
            step,
            f"a backward began before the previous one had ended, when {num_sent} bucket(s) of it had been sent "
            "already, so the ranks are out of step. If an exception ended the previous backward, restart all ranks "
            f"from a checkpoint; if this is activation checkpointing, use {_CHECKPOINTING}",
        )

    def _error(self, step: int, what: str) -> SynclineError:
        self.text = f"rank {self._rank}, step {step}: {what}"
        return SynclineError(self.text)
