"""The exceptions of Syncline, one class for each cause.

    SynclineError
    +-- ContractMismatch       ranks have different modules, arguments or containers of values
    +-- UnreducedGradients     a parameter received no gradient in this backward
    +-- UnevenInputs           a rank ran fewer steps than the others, or skipped a batch or a call
    +-- NonFiniteGradient      gradients hold NaN or infinity
    +-- ReplicaDivergence      replicas that must be equal differ
    +-- CollectiveMismatch     ranks called different collectives, or one collective with different shapes
    +-- CollectiveTimeout      a rank did not take part in a collective before the deadline
    +-- CheckpointCorrupt      a checkpoint is damaged, incomplete, or of an unknown version
    +-- PeerLost               the process of a rank has ended, or the connection to it is lost
    +-- PeerFailed             a rank ended by an exception

The text of each error says what was expected, what was found, where (rank, step, parameter, phase) and what to do. A
wrong argument raises Python's `TypeError` or `ValueError`, as in torch. So code that was written for torch's class
catches the same exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SynclineError(RuntimeError):
    """The base class of all errors about synchronization that Syncline raises."""

    is_of_group = False
    """Whether an error of this class names what all ranks do, so that one of a job's ranks need print it."""
    is_of_peer = False
    """Whether an error of this class only follows from an exception of another rank, which prints it itself."""


class ContractMismatch(SynclineError):
    """Raised when modules, arguments or the tensors of a call differ between ranks.

    Every rank raises the error with the same text, before any tensor is sent.
    """


class UnreducedGradients(SynclineError):
    """Raised when some parameters received no gradient in a synchronized backward.

    It is raised at the end of the backward, or, while another loss may bring the gradient, before the next forward or
    optimizer step; on every rank on which at least one parameter received a gradient.

    Attributes:
        missing: the names of the parameters without a gradient, by rank. Ranks are those of the module's group.
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
            "but some parameters received none"
        )
        remedy = (
            "Do not step an optimizer with these gradients. Use every parameter in the loss, or freeze the unused ones "
            "before you wrap the module (requires_grad=False), or wrap it with find_unused_parameters=True, which "
            "counts a missing gradient as zero. With activation checkpointing, use use_reentrant=False."
        )
        super().__init__("\n  ".join([problem, *lines]) + "\n" + remedy)


def _shown(names: Sequence[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


class UnevenInputs(SynclineError):
    """Raised when a rank skipped a batch, or ended while other ranks still run steps or wait for it in a call."""

    is_of_group = True


class CheckpointCorrupt(SynclineError):
    """Raised when a checkpoint is damaged, incomplete, or of an unknown version.

    The text names the file and, if known, the tensor.
    """


class NonFiniteGradient(SynclineError):
    """Raised when gradients hold NaN or infinity, under `on_nonfinite="raise"`.

    Every rank raises it with the same text at the end of the backward, before any optimizer steps.

    Attributes:
        step: the number of the synchronized backward. The first is step 1.
        found: the names of the parameters whose gradients were not finite on a rank, by rank. Ranks are those of the
            module's group.
        in_mean: the names of parameters whose mean gradient is not finite, although the gradients of each rank were
            finite.
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
    """Raised when replicas that must be equal differ.

    Attributes:
        tensor: the name of the first tensor that differs.
        num_differing: the number of tensors that differ.
        minority_ranks: the ranks of the group whose values differ from those of most ranks; empty if there is no
            majority.
        elements: the indices of the first and the last differing element in the flattened tensor; None if unknown.
        agreed_at_step: the last step at which the tensor was equal on all ranks; None if unknown. Step 0 is the time
            when the module was wrapped.
        found_at_step: the step in which the difference was found; None if it was not found in a training step.
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
    """Raised when ranks called different collectives, or the same collective with different sizes."""

    is_of_group = True


class CollectiveTimeout(SynclineError):
    """Raised when a rank did not take part in a collective before the deadline."""

    is_of_group = True


class PeerLost(SynclineError):
    """Raised when the process of another rank has ended, or the connection to it is lost."""

    is_of_group = True


class PeerFailed(SynclineError):
    """Raised when an exception has ended another rank. A note of the error has the traceback of that rank."""

    is_of_group = True
    is_of_peer = True


class SameDataWarning(RuntimeWarning):
    """Warning that all ranks train on the same data. If that is what you want, filter this warning."""
