"""Typed records of what happened: what `last_step` returns and what `explain()` puts into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BackwardRecord",
    "BucketRecord",
    "BufferRecord",
    "EvolutionRecord",
    "NonFiniteRecord",
    "RoundRecord",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRecord:
    """One bucket of one synchronized backward."""

    index: int
    payload_bytes: int
    """Bytes handed to the transport, control tail included."""
    parameters: tuple[str, ...]
    """The parameters in the bucket, in the order in which their gradients became ready; those that were not
    ready come last."""
    trigger: str | None
    """The parameter whose gradient was the last one missing; None where the bucket waited for the end of
    backward."""
    launched_seconds: float
    """From the first gradient of this backward to the launch."""
    waited_seconds: float
    """Time blocked at the end of backward until this bucket was reduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteRecord:
    """Gradients of one backward that are not finite, and what became of them; the same on every rank."""

    found: Mapping[int, tuple[str, ...]]
    """For each rank whose own gradients held NaN or infinity, the parameters. Empty where all were finite."""
    in_mean: tuple[str, ...]
    """Parameters whose mean is not finite though each rank's own gradients were."""
    outcome: str
    """"finite", "raised", "discarded", "zeroed" or "left to the GradScaler"; "not reduced" under `no_sync`."""
    num_steps: int
    """Steps so far, this one included, to which the policy was applied: discarded ones under `on_nonfinite="skip"`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardRecord:
    """One backward, as it was seen on one rank."""

    step: int
    """Synchronized backwards so far, this one included if it was one. The first is step 1."""
    synchronized: bool
    """False under `no_sync`, and alone."""
    num_gradients: int
    """Parameters that received a gradient."""
    unused: tuple[str, ...]
    """Parameters that received none on this rank."""
    divisor: int
    """What the sum over ranks was divided by: the number of ranks, or of items under `normalize_by`."""
    counted_items: bool
    """Whether the divisor is a number of items."""
    reduced_afterwards: bool
    """Whether `.grad` was reduced after this backward, by `sl.sync_gradients_`; then the divisor is of that."""
    num_reduced: int
    """Gradient elements that were reduced; each of them once."""
    buckets: tuple[BucketRecord, ...]
    duration_seconds: float
    """From the first gradient to the last reduced one."""
    nonfinite: NonFiniteRecord | None = None
    """What was found by `on_nonfinite`; None where nobody looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRecord:
    """What the last forward did about buffers."""

    num_tensors: int
    payload_bytes: int
    sent: bool
    reason: str
    """Why they were sent, or why not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One meeting of parameters, as it was seen on one rank."""

    step: int
    """Optimizer steps that were done by then."""
    what: tuple[str, ...]
    """What was done, in words."""
    num_calls: int
    payload_bytes: int
    """Bytes of the tensors handed to the transport."""
    waited_seconds: float
    duration_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolutionRecord:
    """One step of an evolution strategy; the same on every rank."""

    step: int
    """The first is step 1."""
    losses: tuple[float, ...]
    """Of each member, pair by pair, plus before minus, as they came; not all need be finite."""
    mean_loss: float
    """The mean of those that are finite."""
    best_loss: float
    """The lowest of those that are finite."""
    num_nonfinite: int
    """How many members' losses are not finite, and so counted as the worst."""
