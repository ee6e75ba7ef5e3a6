"""The exception tree: one class per cause, and every text names the remedy.

    SynclineError
    +-- ContractMismatch       ranks were given different modules, arguments or trees
    +-- UnreducedGradients     a parameter received no gradient in this backward
    +-- UnevenInputs           a rank ran fewer steps than its peers, skipped a batch, or left out a call
    +-- NonFiniteGradient      gradients hold NaN or infinity
    +-- ReplicaDivergence      replicas that have to be equal are not
    +-- CollectiveMismatch     ranks called different collectives, or shapes that do not fit
    +-- CollectiveTimeout      a rank did not arrive before the deadline
    +-- CheckpointCorrupt      a checkpoint is not what was written
    +-- PeerLost               a rank's process or connection is gone
    +-- PeerFailed             a rank ended by an exception of its own

Each text says what was expected, what came, where (rank, step, parameter, phase) and what to do.
Plain misuse on one rank (a wrong type, a negative count) is torch's and Python's own `ValueError` or
`TypeError`, so that code written against torch's class catches what it always caught.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointCorrupt",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ContractMismatch",
    "NonFiniteGradient",
    "PeerFailed",
    "PeerLost",
    "ReplicaDivergence",
    "SameDataWarning",
    "SynclineError",
    "UnevenInputs",
    "UnreducedGradients",
]


class SynclineError(RuntimeError):
    """Base of every error that Syncline raises about synchronization."""


class ContractMismatch(SynclineError):
    """The ranks do not agree on what is to be synchronized.

    Raised on every rank with the same text, before any tensor is sent.
    """


class UnreducedGradients(SynclineError):
    """Some parameters received no gradient in a synchronized backward.

    Raised at the end of that backward, on every rank on which a parameter did receive one.

    Attributes:
        missing: for each rank (of the module's group) that lacked gradients, the parameter names.
    """

    def __init__(
        self, missing: Mapping[int, Sequence[str]], *, step: int, num_parameters: int, num_ranks: int
    ) -> None:
        self.missing = {rank: tuple(names) for rank, names in missing.items()}
        if len(self.missing) == num_ranks and len(set(self.missing.values())) == 1:
            where = "on every rank" if num_ranks > 1 else "in a world of one rank"
            lines = [f"{where}: {_shown(self.missing[0])}"]
        else:
            lines = [f"on rank {rank}: {_shown(names)}" for rank, names in self.missing.items()]
        problem = (
            f"step {step}: expected a gradient for each of {num_parameters} parameters in this backward, "
            "but some received none"
        )
        remedy = (
            "Nothing may be stepped with these gradients. Use every parameter in the loss, freeze those that are "
            "not trained (requires_grad=False before wrapping), or wrap with find_unused_parameters=True, which "
            "counts a missing gradient as zero. Activation checkpointing needs use_reentrant=False."
        )
        super().__init__("\n  ".join([problem, *lines]) + "\n" + remedy)


def _shown(names: Sequence[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


class UnevenInputs(SynclineError):
    """A rank skipped a batch, or has ended while others go on: with more steps, or a call that all ranks make."""


class CheckpointCorrupt(SynclineError):
    """A checkpoint is not what was written: damaged, torn, or of a version that is not known.

    The text names the file and, where one is, the tensor.
    """


class NonFiniteGradient(SynclineError):
    """Gradients hold NaN or infinity, under `on_nonfinite="raise"`.

    Raised at the end of that backward, on every rank with the same text, before anyone steps.

    Attributes:
        step: the synchronized backward; the first is step 1.
        found: for each rank (of the module's group) whose own gradients were not finite, the parameter names.
        in_mean: names of parameters whose mean is not finite though each rank's own gradients were.
    """

    def __init__(
        self,
        text: str,
        *,
        step: int,
        found: Mapping[int, Sequence[str]],
        in_mean: Sequence[str] = (),
    ) -> None:
        super().__init__(text)
        self.step = step
        self.found = {rank: tuple(names) for rank, names in found.items()}
        self.in_mean = tuple(in_mean)


class ReplicaDivergence(SynclineError):
    """Replicas that have to be equal are not.

    Attributes:
        tensor: the name of the first one that differs.
        num_differing: how many differ.
        minority_ranks: ranks (of the group) that have something that most ranks have not; empty where nobody can tell.
        elements: the first and the last element of it that differ, along the flattened tensor; None where they were
            not looked for.
        agreed_at_step: the step at which all ranks agreed on it last (0: when it was wrapped); None where that is
            not known.
        found_at_step: the step at which it differed; None outside of training steps.
    """

    def __init__(
        self,
        text: str,
        *,
        tensor: str,
        num_differing: int,
        minority_ranks: tuple[int, ...],
        elements: tuple[int, int] | None = None,
        agreed_at_step: int | None = None,
        found_at_step: int | None = None,
    ) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.num_differing = num_differing
        self.minority_ranks = minority_ranks
        self.elements = elements
        self.agreed_at_step = agreed_at_step
        self.found_at_step = found_at_step


class CollectiveMismatch(SynclineError):
    """Ranks met in different collectives, or with sizes that do not fit together."""


class CollectiveTimeout(SynclineError):
    """A rank did not take part in a collective before its deadline."""


class PeerLost(SynclineError):
    """The process or the connection of a peer is gone."""


class PeerFailed(SynclineError):
    """A peer ended by an exception; the text carries the peer's traceback."""


class SameDataWarning(RuntimeWarning):
    """All ranks train on the same data. Filter this category where that is meant, as for training on full batches."""
