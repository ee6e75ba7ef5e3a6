"""The exceptions of Syncline: one class per cause. Every text names the remedy.

    SynclineError
    +-- ContractMismatch       ranks have different modules, arguments or trees
    +-- UnreducedGradients     a parameter received no gradient in this backward
    +-- UnevenInputs           a rank ran fewer steps than its peers, skipped a batch, or left out a call
    +-- NonFiniteGradient      gradients hold NaN or infinity
    +-- ReplicaDivergence      replicas that must be equal differ
    +-- CollectiveMismatch     ranks called different collectives, or used shapes that do not fit
    +-- CollectiveTimeout      a rank did not arrive before the deadline
    +-- CheckpointCorrupt      a checkpoint differs from what was written
    +-- PeerLost               a rank's process has ended, or its connection is lost
    +-- PeerFailed             a rank ended by an exception of its own

Each text says what was expected, what was found, where (rank, step, parameter, phase) and what to do. Plain misuse on
one rank (a wrong type, a negative count) raises Python's `ValueError` or `TypeError`, as torch does. Code written for
torch's class therefore catches the same exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SynclineError(RuntimeError):
    """Base class of all errors that Syncline raises about synchronization."""


class ContractMismatch(SynclineError):
    """Raised when ranks do not agree on what to synchronize.

    It is raised on every rank with the same text, before any tensor is sent.
    """


class UnreducedGradients(SynclineError):
    """Raised when some parameters received no gradient in a synchronized backward.

    It is raised at the end of the backward, on every rank on which some parameter did receive a gradient.

    Attributes:
        missing: parameter names by rank (of the module's group), for each rank that lacked gradients.
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
            "Do not step an optimizer with these gradients. Use every parameter in the loss, freeze those that are "
            "not trained (requires_grad=False before wrapping), or wrap with find_unused_parameters=True, which "
            "counts a missing gradient as zero. Activation checkpointing needs use_reentrant=False."
        )
        super().__init__("\n  ".join([problem, *lines]) + "\n" + remedy)


def _shown(names: Sequence[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


class UnevenInputs(SynclineError):
    """Raised when one rank skipped a batch, or ended while others still run steps or calls."""


class CheckpointCorrupt(SynclineError):
    """Raised when a checkpoint is damaged, incomplete, or of an unknown version.

    The text names the file and, if there is one, the tensor.
    """


class NonFiniteGradient(SynclineError):
    """Raised when gradients hold NaN or infinity, under `on_nonfinite="raise"`.

    It is raised at the end of the backward, on every rank with the same text, before any optimizer step.

    Attributes:
        step: the number of the synchronized backward; the first is step 1.
        found: parameter names by rank (of the module's group), for each rank whose own gradients were not finite.
        in_mean: names of parameters whose mean is not finite although the gradients of each rank were finite.
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
    """Raised when replicas differ that must be equal.

    Attributes:
        tensor: the name of the first tensor that differs.
        num_differing: the number of tensors that differ.
        minority_ranks: ranks (of the group) whose values differ from those of most ranks; empty if they cannot be
            determined.
        elements: indices of the first and the last differing element of the flattened tensor; None if they were not
            searched for.
        agreed_at_step: the last step at which all ranks agreed on the tensor (0 means when it was wrapped); None if
            unknown.
        found_at_step: the step at which the difference was found; None outside of training steps.
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
    """Raised when ranks called different collectives, or the same one with sizes that do not fit together."""


class CollectiveTimeout(SynclineError):
    """Raised when a rank did not take part in a collective before the deadline."""


class PeerLost(SynclineError):
    """Raised when the process of a peer has ended, or the connection to it is lost."""


class PeerFailed(SynclineError):
    """Raised when a peer ended by an exception. The text contains the peer's traceback."""


class SameDataWarning(RuntimeWarning):
    """Warning that all ranks train on the same data. Filter it if that is intended, as in full-batch training."""
