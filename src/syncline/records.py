"""The records of steps. `ddp.last_step` returns the record of the last backward. `ddp.explain()` describes records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from syncline.words import (
    describe_ranks,
    format_bytes,
    format_count,
    format_names,
    format_time,
    one_line,
    wrapped,
)

_MAX_BUCKETS = 6
"""The number of buckets to list in the text of a backward. The text shows totals for all further buckets."""

_MAX_RANKS = 2
"""The number of ranks to name in a line about gradients that are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRecord:
    """A record of one bucket in one synchronized backward."""

    index: int
    payload_bytes: int
    """Number of bytes that were passed to the transport, including control data."""
    parameters: tuple[str, ...]
    """Names of the parameters in the bucket, in the order in which their gradients became ready. Parameters without a
    gradient in this backward come last."""
    trigger: str | None
    """The parameter whose gradient completed the bucket. None if the bucket was launched when backward ended."""
    launched_seconds: float
    """Time from the first gradient of this backward to the launch of the bucket."""
    waited_seconds: float
    """Time for which backward waited at its end until this bucket was reduced."""

    def __repr__(self) -> str:
        return one_line(self, f"{self._what()}, waited {format_time(self.waited_seconds)}")

    def __str__(self) -> str:
        when = "at the end of backward" if self.trigger is None else f"when {self.trigger} was ready"
        sent = f"sent {when}, at {format_time(self.launched_seconds)}"
        return f"bucket {self._what()}: {sent}, waited {format_time(self.waited_seconds)}"

    def _what(self) -> str:
        parameters = format_count(len(self.parameters), "parameter")
        return f"{self.index}, {format_bytes(self.payload_bytes)}, {parameters}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteRecord:
    """A record of the gradients of one backward that are not finite. It is the same on every rank."""

    found: Mapping[int, tuple[str, ...]]
    """The names of the parameters whose gradients held NaN or infinity on a rank, by rank. Empty if all ranks had
    finite gradients."""
    in_mean: tuple[str, ...]
    """Names of the parameters whose mean gradient is not finite, although the gradients of each rank were finite."""
    outcome: str
    """The reaction to the gradients: "warned", "raised", "discarded", "zeroed" or "left to the GradScaler". It is
    "finite" if all gradients were finite, and "not reduced" under `no_sync`."""
    num_steps: int
    """Number of steps so far, including this step, in which the policy was applied because gradients were not finite.
    Under `on_nonfinite="skip"`, this is the number of discarded steps."""

    def __repr__(self) -> str:
        ranks = describe_ranks(tuple(self.found)) if self.found else "no rank"
        return one_line(
            self, f"not finite on {ranks}, {self.outcome}, {format_count(self.num_steps, 'step')} so far"
        )

    def __str__(self) -> str:
        if self.found or self.in_mean:
            return describe_nonfinite(self, _MAX_RANKS)
        return f"all gradients are finite (not finite in {format_count(self.num_steps, 'step')} so far)"


def describe_nonfinite(record: NonFiniteRecord, num_shown: int | None = None) -> str:
    """Return a line that names the gradients that are not finite, and says what was done about them.

    Args:
        record: a record with at least one gradient that is not finite.
        num_shown: the number of ranks to name. Pass None to name all ranks.
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
class RankTimes:
    """The times that one rank has worked in one step. Time in which it waited for other ranks does not count.

    The step begins when the previous synchronized backward ends.
    """

    update_seconds: float
    """Time until the attached optimizers had stepped. It is 0 if no optimizer is attached."""
    data_seconds: float
    """Time from then until the forward: usually the time to load the data. If no optimizer is attached, the optimizer's
    step is part of it. Under `no_sync`, it includes the time between the micro-batches."""
    forward_seconds: float
    """Time from the beginning of the forward to the first gradient. It includes the computation of the loss."""
    backward_seconds: float
    """Time from the first gradient until the last bucket was sent."""

    @property
    def total_seconds(self) -> float:
        return self.update_seconds + self.data_seconds + self.forward_seconds + self.backward_seconds

    def __repr__(self) -> str:
        phases = (f"{phase} {format_time(getattr(self, f'{phase}_seconds'))}" for phase in PHASES)
        return one_line(self, ", ".join(phases))


class LateRank(NamedTuple):
    """The rank for which the other ranks waited in a step, and the phase in which it lost the most time."""

    rank: int
    late_seconds: float
    """How much longer this rank worked than the other ranks (their median)."""
    phase: str
    """The phase: "update", "data", "forward" or "backward", as in `RankTimes`."""
    phase_seconds: float
    """Time of the late rank in this phase."""
    usual_seconds: float
    """Time of the other ranks in this phase (their median)."""

    def __repr__(self) -> str:
        late, took, usual = map(format_time, (self.late_seconds, self.phase_seconds, self.usual_seconds))
        return one_line(self, f"rank {self.rank} by {late}: {self.phase} took {took}, {usual} on the others")


_LATE_SECONDS = 0.0005

_LATE_SHARE = 0.05

PHASES = ("update", "data", "forward", "backward")
"""The phases of a step, in order. `RankTimes` defines them."""

_PHASES_IN_WORDS = {
    "update": "its optimizer step",
    "data": "its data loading, which is all the time before the forward,",
    "forward": "its forward and loss",
    "backward": "its backward",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """The times of one step, from the end of the previous synchronized backward to the end of this one."""

    step_seconds: float
    """Duration of the step on this rank."""
    waited_seconds: float
    """Time of the step in which this rank waited for other ranks, in all calls of Syncline on this group."""
    of_ranks: tuple[RankTimes | None, ...]
    """The times of each rank, the same on every rank. None for a rank that had no inputs left, or no earlier step."""

    def __repr__(self) -> str:
        late = "no rank was late" if self.late is None else f"rank {self.late.rank} was late"
        step, waited = format_time(self.step_seconds), format_time(self.waited_seconds)
        return one_line(self, f"step {step}, waited {waited}, {late}")

    @property
    def late(self) -> LateRank | None:
        """The rank for which the others waited. None if no rank was late by 0.5 ms and 5 % of the others' time."""
        known = {rank: times for rank, times in enumerate(self.of_ranks) if times is not None}
        if len(known) < 2:
            return None
        rank = max(known, key=lambda one: known[one].total_seconds)
        latest = known.pop(rank)
        usual = median_low(times.total_seconds for times in known.values())
        late_seconds = latest.total_seconds - usual
        if late_seconds < max(_LATE_SECONDS, _LATE_SHARE * usual):
            return None

        def compare(phase: str) -> tuple[float, float]:
            name = f"{phase}_seconds"
            return getattr(latest, name), median_low(getattr(times, name) for times in known.values())

        lost = {phase: compare(phase) for phase in PHASES}
        phase = max(lost, key=lambda one: lost[one][0] - lost[one][1])
        return LateRank(rank, late_seconds, phase, *lost[phase])


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRecord:
    """A record of a straggler: a rank that was slow over many steps. It is the same on every rank."""

    rank: int
    phase: str
    """The phase in which it lost the most time: "update", "data", "forward" or "backward", as in `RankTimes`."""
    phase_seconds: float
    """Its time in this phase, a step. This and the other times are means over the first `num_steps` steps."""
    usual_seconds: float
    """The median of the times of all ranks in this phase."""
    late_seconds: float
    """How much longer than the median of the ranks it worked in all phases. All ranks waited for it so long."""
    num_steps: int
    """The number of steps over which the times were compared."""
    from_step: int
    """The last one of these steps."""
    to_step: int | None = None
    """The step after which the rank was found to be no longer slow; None if it is still slow."""

    def __repr__(self) -> str:
        late, end = format_time(self.late_seconds), "now" if self.to_step is None else self.to_step
        return one_line(
            self, f"rank {self.rank} by {late} a step, {self.phase}, step {self.from_step} to {end}"
        )

    def __str__(self) -> str:
        took, usual, late = map(format_time, (self.phase_seconds, self.usual_seconds, self.late_seconds))
        end = "" if self.to_step is None else f", until step {self.to_step}"
        return (
            f"step {self.from_step}: rank {self.rank} is slow: over the last {self.num_steps} steps, "
            f"{_PHASES_IN_WORDS[self.phase]} took {took} a step, the median of the ranks is {usual}; "
            f"all ranks wait {late} a step{end}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardRecord:
    """A record of one backward on one rank.

    `print(record)` shows a summary of about 12 lines, even for a large module; `repr` shows one line.
    `pprint.pprint(dataclasses.asdict(record))` shows every field with all names.

    Examples:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> print(ddp.last_step)
        step 1: 2 gradients, not reduced: .grad holds the gradients of this rank
    """

    step: int
    """Number of synchronized backwards so far, including this backward if it was synchronized. The first is step 1."""
    synchronized: bool
    """Whether the gradients were reduced in this backward. False under `no_sync`, and in a world of one rank."""
    num_gradients: int
    """Number of parameters that received a gradient on this rank."""
    unused: tuple[str, ...]
    """Names of the parameters that received no gradient on this rank."""
    divisor: int
    """The number by which the sum over ranks was divided: the number of ranks, or under `normalize_by` the number of
    items."""
    counted_items: bool
    """Whether `divisor` is a number of items (`normalize_by`)."""
    reduced_afterwards: bool
    """Whether `sl.sync_gradients_` reduced `.grad` after this backward. If so, `divisor` belongs to that reduction."""
    num_reduced: int
    """Number of gradient elements that were reduced. An element counts once, not once per rank."""
    buckets: tuple[BucketRecord, ...]
    duration_seconds: float
    """Time from the first gradient of this backward until all gradients were reduced."""
    nonfinite: NonFiniteRecord | None = None
    """The result of the `on_nonfinite` check. It is None under "ignore", and under "warn" except in the step that is
    warned of."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The means over ranks of the values that were given to `ddp.report`, by name. If the backward was not
    synchronized, these are the values of this rank alone."""
    timing: StepTiming | None = None
    """The times of the step on all ranks. None in the first step, and if the backward was not synchronized."""

    def __repr__(self) -> str:
        return one_line(self, self._headline())

    def scalars(self) -> dict[str, float]:
        """Return the numbers of this backward by name, for loggers such as TensorBoard and Weights & Biases.

        These are the `metrics`, and three numbers of this rank: "backward/duration_seconds", "backward/waited_seconds"
        and "backward/payload_bytes". The last two are sums over the buckets, and 0 if nothing was reduced.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> loss = ddp(torch.ones(1, 2)).sum()
            >>> ddp.report(loss=loss)
            >>> loss.backward()
            >>> list(ddp.last_step.scalars())
            ['loss', 'backward/duration_seconds', 'backward/waited_seconds', 'backward/payload_bytes']
        """
        return {
            **self.metrics,
            "backward/duration_seconds": self.duration_seconds,
            "backward/waited_seconds": sum(bucket.waited_seconds for bucket in self.buckets),
            "backward/payload_bytes": sum(bucket.payload_bytes for bucket in self.buckets),
        }

    def __str__(self) -> str:
        lines = [self._headline()]
        num_shown = len(self.buckets) if len(self.buckets) <= _MAX_BUCKETS + 1 else _MAX_BUCKETS
        others = self.buckets[num_shown:]
        lines += map(str, self.buckets[:num_shown])
        if others:
            num_bytes = format_bytes(sum(bucket.payload_bytes for bucket in others))
            waited = format_time(sum(bucket.waited_seconds for bucket in others))
            lines.append(f"and {len(others)} more buckets, {num_bytes}, waited {waited} in all")
        if self.metrics:
            lines.append("metrics: " + ", ".join(f"{name} {mean:.6g}" for name, mean in self.metrics.items()))
        if self.unused:
            lines.append(f"no gradient on this rank: {format_names(self.unused)}")
        if self.nonfinite is not None and self.synchronized:
            lines.append(str(self.nonfinite))
        first, *rest = lines
        return "\n".join([*wrapped(first), *(short for line in rest for short in wrapped(f"  {line}"))])

    def _headline(self) -> str:
        return f"step {self.step}: {format_count(self.num_gradients, 'gradient')}, {self._result()}"

    def _result(self) -> str:
        mean = describe_mean(self)
        if self.reduced_afterwards:
            return f"reduced after this backward: {mean}"
        if not self.synchronized:
            return "not reduced: .grad holds the gradients of this rank"
        buckets = format_count(len(self.buckets), "bucket")
        return f"{mean}, {self.num_reduced:,} elements in {buckets}, {format_time(self.duration_seconds)}"


def describe_mean(record: BackwardRecord) -> str:
    """Return a text that names the divisor of a backward's gradients, such as `mean over 2 ranks`."""
    return f"mean over {format_count(record.divisor, 'item' if record.counted_items else 'rank')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRecord:
    """A record of the synchronization of buffers in the last forward."""

    num_tensors: int
    payload_bytes: int
    sent: bool
    reason: str
    """The reason why no buffers were sent; empty if they were sent."""

    def __repr__(self) -> str:
        size = f"{format_count(self.num_tensors, 'tensor')}, {format_bytes(self.payload_bytes)}"
        return one_line(self, f"{size}, {'sent' if self.sent else f'not sent: {self.reason}'}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """A record of one parameter sync on one rank."""

    step: int
    """Number of optimizer steps that were completed before the sync."""
    what: tuple[str, ...]
    """A text for each action of the sync."""
    num_calls: int
    payload_bytes: int
    """Number of bytes of the tensors that were passed to the transport."""
    waited_seconds: float
    duration_seconds: float

    def __repr__(self) -> str:
        took, waited = format_time(self.duration_seconds), format_time(self.waited_seconds)
        what = f"{'; '.join(self.what)}: {format_count(self.num_calls, 'call')}, {format_bytes(self.payload_bytes)}"
        return one_line(self, f"after step {self.step}, {took}, waited {waited}, {what}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolutionRecord:
    """A record of one step of an evolution strategy. It is the same on every rank."""

    step: int
    """The number of the step. The first is step 1."""
    losses: tuple[float, ...]
    """The losses of all members as measured. The two members of a pair are adjacent: first the member with the positive
    perturbation, then the member with the negative perturbation. A loss can be NaN or infinite."""
    mean_loss: float
    """Mean of the finite losses."""
    best_loss: float
    """Lowest finite loss."""
    num_nonfinite: int
    """Number of members whose loss is NaN or infinite. Such a loss counts as the worst loss."""

    def __repr__(self) -> str:
        losses = f"mean {self.mean_loss:.6g}, best {self.best_loss:.6g}"
        members = f"{format_count(len(self.losses), 'member')}, {self.num_nonfinite} not finite"
        return one_line(self, f"step {self.step}, {losses}, {members}")
