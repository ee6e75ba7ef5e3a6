"""Typed records of what happened: what `last_step` returns and what `explain()` puts into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.words import format_bytes, format_count, format_names

__all__ = [
    "BackwardRecord",
    "BucketRecord",
    "BufferRecord",
    "EvolutionRecord",
    "NonFiniteRecord",
    "RoundRecord",
    "describe_nonfinite",
]


_MAX_BUCKETS = 6
"""Shown of one backward; the others are counted."""

_MAX_RANKS = 2


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

    def __str__(self) -> str:
        when = "at the end of backward" if self.trigger is None else f"when {self.trigger} was ready"
        size, names = format_bytes(self.payload_bytes), format_names(self.parameters, 2)
        sent = f"sent {when}, at {_ms(self.launched_seconds)}"
        return f"bucket {self.index}, {size}: {names}; {sent}, waited {_ms(self.waited_seconds)}"


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

    def __str__(self) -> str:
        if self.found or self.in_mean:
            return describe_nonfinite(self, _MAX_RANKS)
        return f"not finite: nothing in this step ({format_count(self.num_steps, 'step')} before)"


def describe_nonfinite(record: NonFiniteRecord, num_shown: int | None = None) -> str:
    """Return a line that names the gradients that are not finite, and the outcome.

    Args:
        record: with at least one such gradient.
        num_shown: how many ranks are named; None names all.
    """
    where = [f"on rank {rank}: {format_names(names)}" for rank, names in record.found.items()]
    if num_shown is not None and len(where) > num_shown + 1:
        where[num_shown:] = [f"and on {len(where) - num_shown} more ranks"]
    if record.in_mean:
        where.append(f"in the mean of finite gradients: {format_names(record.in_mean)}")
    return (
        f"not finite {'; '.join(where)} -> {record.outcome} ({format_count(record.num_steps, 'step')} so far)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardRecord:
    """One backward, as it was seen on one rank.

    `print(record)` is a summary of about 12 lines at most, however large the module; `pprint.pprint(record)` shows
    every field, with all names.

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> print(ddp.last_step)
        step 1: 2 gradients, not reduced: under no_sync, or this rank is alone
    """

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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over ranks of what `ddp.report` was given before this backward; of this rank alone if not synchronized."""

    def __str__(self) -> str:
        lines = [f"step {self.step}: {format_count(self.num_gradients, 'gradient')}, {self._what_became()}"]
        num_shown = len(self.buckets) if len(self.buckets) <= _MAX_BUCKETS + 1 else _MAX_BUCKETS
        others = self.buckets[num_shown:]
        lines += map(str, self.buckets[:num_shown])
        if others:
            num_bytes = format_bytes(sum(bucket.payload_bytes for bucket in others))
            waited = _ms(sum(bucket.waited_seconds for bucket in others))
            lines.append(f"and {len(others)} more buckets, {num_bytes}, waited {waited} in all")
        if self.metrics:
            lines.append("metrics: " + ", ".join(f"{name} {mean:.6g}" for name, mean in self.metrics.items()))
        if self.unused:
            lines.append(f"no gradient on this rank: {format_names(self.unused)}")
        if self.nonfinite is not None and self.synchronized:
            lines.append(str(self.nonfinite))
        return "\n  ".join(lines)

    def _what_became(self) -> str:
        mean = f"mean over {format_count(self.divisor, 'item' if self.counted_items else 'rank')}"
        if self.reduced_afterwards:
            return f"reduced after this backward: {mean}"
        if not self.synchronized:
            return "not reduced: under no_sync, or this rank is alone"
        buckets = format_count(len(self.buckets), "bucket")
        return f"{mean}, {self.num_reduced:,} elements in {buckets}, {_ms(self.duration_seconds)}"


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
