"""The search for the values in which replicas differ, and the errors that name these values."""

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
    """The differences that a search has located; the same on every rank."""

    differences: Sequence[Difference]
    """The values that differ; empty if all values are equal."""
    leaves: Sequence[Leaf]
    """The values that were compared."""
    agreed_at: int | None
    """The step at which all ranks last agreed on the first difference; None if unknown."""
    are_buffers: bool = False
    """Whether the values are buffers, which differed before forward changed them."""

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks agree on each value that differs."""
        return all(one.has_majority for one in self.differences)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks whose replicas have to be equal.

    Attributes:
        title: the name of the module, for messages.
        transport: the transport between the ranks.
        ranks: the numbers by which users know the ranks of `transport`.
    """

    title: str
    transport: Transport
    ranks: Sequence[int]

    def search(self, state: Coverage, buffers: Coverage, step: int) -> Located:
        """Search the whole replica for differences, then the buffers that were hashed. A collective call.

        Args:
            state: the parameters and the state of optimizers.
            buffers: the buffers.
            step: the number of the present step, for messages.

        Raises:
            ReplicaDivergence: the state of optimizers has different names or shapes; on every rank.
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
        """Raise unless all ranks have state for the same parameters, of the same shapes. A collective call."""
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
            f"they differ: {shown}. Step attached optimizers equally often, with the same parameters, on every rank",
            tensor=min(apart).split("  ")[0],
            num_differing=len(apart),
            minority_ranks=(),
            found_at_step=step,
        )

    def _check_in(self, step: int) -> str:
        return f"{self.title}, step {step}, replica check"

    def divergence(self, located: Located, step: int, *, with_advice: bool) -> ReplicaDivergence:
        """Return the error that names the differences.

        Args:
            located: at least one difference.
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
        """Return the error for fingerprints that differed although a search finds all values equal."""
        return ReplicaDivergence(
            f"{self._check_in(step)}: the fingerprints of the ranks differed when the backward began, but all values "
            "are equal now that it has ended. So some ranks write parameters or optimizer state while a backward runs. "
            "Write them between the steps, on all ranks",
            tensor="",
            num_differing=0,
            minority_ranks=(),
            found_at_step=step,
        )


def _remedy(located: Located, *, with_advice: bool) -> str:
    """Return sentences on the possible causes of differences, and on how to make the replicas equal."""
    cause = (
        "Buffers differ though they have just been synchronized. Possible causes are a bit that flipped in memory, and "
        "a buffer that is replaced on some ranks only."
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
