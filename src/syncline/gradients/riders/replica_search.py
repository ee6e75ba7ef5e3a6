"""The search for the values that differ between replicas, and the errors that name these values.

A value is a tensor or an integer of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.equality.leaves import Leaf
from syncline.equality.locate import Difference, divergence_error, locate
from syncline.errors import ReplicaDivergence
from syncline.gradients.riders.coverage import Coverage
from syncline.transport.base import Transport
from syncline.words import describe_ranks


@dataclass(frozen=True, slots=True)
class Located:
    """The result of a search for differences between replicas. Every rank has the same result."""

    differences: Sequence[Difference]
    """The values that differ between ranks. It is empty if all values are equal."""
    leaves: Sequence[Leaf]
    """The leaves whose values were compared."""
    agreed_at: int | None
    """The step at which all ranks last had the same bits in the first of these values. It is None if unknown."""
    are_buffers: bool = False
    """Whether the values are buffers. Their hashes were computed before the forward changed them."""

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks agree on each of the values in `differences`."""
        return all(one.has_majority for one in self.differences)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks whose replicas must be equal.

    Attributes:
        title: the name of the module, for messages.
        transport: the transport between the ranks.
        ranks: for each rank of `transport`, the number of this rank in the user's world, for messages.
    """

    title: str
    transport: Transport
    ranks: Sequence[int]

    def search(self, state: Coverage, buffers: Coverage, step: int) -> Located:
        """Search all parameters and optimizer state for differences between ranks. This is a collective call.

        If no difference is found there, compare the hashes of buffers.

        Args:
            state: the parameters and the state of optimizers.
            buffers: the buffers, some of which were hashed before forwards.
            step: the number of the present step, for messages.

        Raises:
            ReplicaDivergence: the names or shapes of the optimizers' state differ. Every rank raises the error.
        """
        leaves = state.leaves
        self._check_structure(leaves, step)
        found = locate([leaf.name for leaf in leaves], [leaf.value() for leaf in leaves], self.transport)
        if found or not buffers.hashes:
            return Located(found, leaves, state.agreed_at(found[0].index) if found else None)
        hashes = buffers.hashes_by_leaf()
        names = [buffers.leaves[index].name for index in hashes]
        found = locate(names, [None] * len(names), self.transport, mine=list(hashes.values()))
        return Located(found, buffers.leaves, buffers.all_agreed_at, are_buffers=True)

    def _check_structure(self, leaves: Sequence[Leaf], step: int) -> None:
        """Raise an error if names, dtypes or shapes of the leaves differ between ranks. This is a collective call."""
        lines = []
        for leaf in leaves:
            value = leaf.value()
            form = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "a number"
            lines.append(f"{leaf.name}  {form}")
        forms = self.transport.all_gather_bytes("\n".join(lines).encode())
        if len(set(forms)) == 1:
            return
        rows: list[set[str]] = [set(row.decode().split("\n")) for row in forms]
        apart = set().union(*rows) - rows[0].intersection(*rows)
        shown = "; ".join(
            f"rank {self.ranks[at]} has {', '.join(sorted(row & apart)[:3])}"
            for at, row in enumerate(rows)
            if row & apart
        )
        raise ReplicaDivergence(
            f"{self._check_in(step)}: expected optimizers with state of the same names and shapes on all ranks, but "
            f"the state differs: {shown}. On every rank, attach optimizers of the same parameters, and step them "
            "equally often",
            tensor=min(apart).split("  ")[0],
            num_differing=len(apart),
            minority_ranks=(),
            found_at_step=step,
        )

    def _check_in(self, step: int) -> str:
        return f"{self.title}, step {step}, replica check"

    def divergence(self, located: Located, step: int, *, with_advice: bool) -> ReplicaDivergence:
        """Return the error that names the values that differ.

        Args:
            located: the result of a search that found at least one difference.
            step: the number of the present step.
            with_advice: whether the error says how to make the replicas equal.
        """
        return divergence_error(
            self._check_in(step),
            [one.among(self.ranks) for one in located.differences],
            num_compared=len(located.leaves),
            num_ranks=self.transport.size,
            remedy=_remedy(located, with_advice=with_advice),
            agreed_at=located.agreed_at,
            step=step,
            where="" if len(self.ranks) == max(self.ranks) + 1 else describe_ranks(self.ranks),
        )

    def equal_again(self, step: int) -> ReplicaDivergence:
        """Return the error for the case that fingerprints differed, but a later search found all values equal."""
        return ReplicaDivergence(
            f"{self._check_in(step)}: the fingerprints of the replicas differed when the backward began, but all "
            "values were equal when the backward had ended. So some rank writes parameters or optimizer state while a "
            "backward runs. Write them between the steps, on all ranks",
            tensor="",
            num_differing=0,
            minority_ranks=(),
            found_at_step=step,
        )


def _remedy(located: Located, *, with_advice: bool) -> str:
    """Return sentences that name possible causes of the differences and say how to make the replicas equal."""
    cause = (
        "Buffers differ although they were synchronized just before. Possible causes are a bit that flipped in memory, "
        "and a buffer that is replaced on some ranks only."
        if located.are_buffers
        else "Possible causes are a bit that flipped in memory, a write on some ranks only, and an operation whose "
        "result differs between ranks (`syncline doctor` searches for such operations)."
    )
    if not with_advice:
        return cause
    are_of_optimizers = {one.name.startswith("optimizer ") for one in located.differences}
    targets = [
        f"sl.broadcast_({target}, src=...)"
        for target, is_of_optimizer in (("ddp", False), ("optimizer", True))
        if is_of_optimizer in are_of_optimizers
    ]
    start = (
        "To continue,"
        if not located.agreed_at
        else f"Load a checkpoint of step {located.agreed_at} or earlier, or"
    )
    return f"{cause} {start} make the replicas equal by {' and '.join(targets)}."
