"""The figures of a run: where a step's time goes, which rank and which bucket others wait for (pure functions).

Replicas that differed, as the checks of the run have found them, are below.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from syncline.tools.report.run import Run
from syncline.tools.report.steps import RankStep, Sent
from syncline.tracing import rows
from syncline.words import describe_ranks, format_count

PHASES = ("data", "forward", "backward", "update")
"""The phases in which a rank works."""

_CALLS = ("buffers", "sync", "call")

EXPOSED = ("late", "transfer", *_CALLS)
"""The parts of a step in which a rank waits for others, or for the transport."""

PARTS: Mapping[str, str] = {
    "data": "before the forward (data)",
    "forward": "forward and loss",
    "backward": "backward",
    "update": "from backward to the end of the optimizer's step",
    "late": "waits for ranks that are late",
    "transfer": "waits for gradients that are under way",
    "buffers": "synchronizes buffers",
    "sync": "synchronizes parameters",
    "call": "other calls of Syncline",
}
"""All parts of a step, in words."""

_PART_OF: Mapping[str, str] = {
    **{kind: kind for kind in (*PHASES, *_CALLS)},
    "loss": "forward",
    "optimizer": "update",
}
"""The part of a step to which a kind of span belongs. Waits are divided into "late" and "transfer"."""

ENOUGH_STEPS = 10
"""The smallest number of steps for a verdict. Figures of fewer steps are mostly noise."""

_ENOUGH_MICROS = 20_000


@dataclass(frozen=True, kw_only=True)
class BucketFigures:
    """One bucket. Times are means in microseconds a step."""

    bucket: int
    payload_bytes: int
    parameters: Sequence[str]
    late: float
    """How long a rank waits for the bucket because another rank has not sent it yet."""
    transfer: float
    """How long a rank waits for the bucket after all ranks have sent it."""
    duration: float
    """How long the reduction took after all ranks had sent it and the bucket before was reduced."""
    sent: float
    """When it was sent, after the beginning of the backward: the mean of the ranks."""
    waits_for: int | None
    """The rank that usually sent it last; None if no rank did so in half of the steps."""


@dataclass(frozen=True, kw_only=True)
class LateRankFigures:
    """The rank for which the others wait most."""

    rank: int
    caused: float
    """How long each other rank waits for it, in microseconds a step."""
    share: float
    """The fraction of all waits for late ranks that this rank causes."""
    phase: str
    """The phase in which it loses the most time; "other" stands for calls of Syncline and parameter syncs."""
    phase_time: float
    usual_time: float
    """The median of the others in this phase."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a run. Times are in microseconds."""

    num_steps: int
    """The number of steps over which they were taken."""
    parts: Mapping[str, float]
    """The mean time of each part of a step: the phases, and the parts in `EXPOSED`. They add up to a step."""
    phases_of_ranks: Mapping[int, Mapping[str, float]]
    """The mean time of each rank in each phase."""
    late: LateRankFigures | None
    """None if ranks do not wait for late ones, or if there is one rank."""
    buckets: Sequence[BucketFigures]
    payload_bytes: float
    """The bytes that a rank passes to the transport in a step."""
    backward: float
    """The mean length of a synchronized backward, until its waits begin."""

    @property
    def step(self) -> float:
        """The mean length of a step: the sum of its parts."""
        return sum(self.parts.values())

    @property
    def is_enough(self) -> bool:
        """Whether there are enough steps for a verdict."""
        return self.num_steps >= ENOUGH_STEPS and self.num_steps * self.step >= _ENOUGH_MICROS

    def share(self, *parts: str) -> float:
        """Return the fraction of a step that these parts take."""
        return sum(self.parts.get(part, 0.0) for part in parts) / max(1.0, self.step)

    @property
    def exposed(self) -> float:
        """The fraction of a step in which ranks wait for others, or for the transport."""
        return self.share(*EXPOSED)


def figures_of(run: Run, steps: Sequence[int] | None = None) -> Figures:
    """Return the figures of a run. Without a complete step, they have no parts, and `num_steps` is 0.

    Args:
        run: the run.
        steps: the steps to look at; None for all steady ones.
    """
    chosen = run.steady if steps is None else list(steps)
    parts_of_ranks: dict[int, list[dict[str, float]]] = defaultdict(list)
    caused: Counter[int] = Counter()
    buckets: dict[tuple[str, int], list[tuple[Sent, float, float, int]]] = defaultdict(list)
    durations: dict[tuple[str, int], list[int]] = defaultdict(list)
    payloads, backwards = [], []
    for ranks in (run.steps[number] for number in chosen):
        last = _last_sent(ranks)
        for rank, step in ranks.items():
            parts = dict.fromkeys(PARTS, 0.0)
            for span in step.spans:
                if span.kind in _PART_OF:
                    parts[_PART_OF[span.kind]] += span.length
            for sent in step.buckets:
                to_rank, at = last[sent.reduction]
                waited = max(0, sent.reduced - sent.wait_began)
                late = min(waited, max(0, at - sent.wait_began)) if to_rank != rank else 0
                parts["late"] += late
                parts["transfer"] += waited - late
                caused[to_rank] += late
                buckets[sent.module, sent.bucket].append((sent, late, waited - late, to_rank))
            parts_of_ranks[rank].append(parts)
            began = [one.wait_began - one.began for one in step.buckets if one.module == run.module]
            backwards += [min(began)] if began else []
            payloads.append(step.payload_bytes + sum(sent.payload_bytes for sent in step.buckets))
            for sent, duration in _durations(step, last):
                durations[sent.module, sent.bucket].append(duration)
    means = _means([parts for found in parts_of_ranks.values() for parts in found])
    of_ranks = {rank: _means(found) for rank, found in parts_of_ranks.items()}
    return Figures(
        num_steps=len(chosen),
        parts=means,
        phases_of_ranks={rank: {phase: own[phase] for phase in PHASES} for rank, own in of_ranks.items()},
        late=_late(caused, of_ranks, len(chosen)),
        buckets=[_bucket(found, durations[key], len(payloads)) for key, found in buckets.items()],
        payload_bytes=fmean(payloads or [0]),
        backward=fmean(backwards) if backwards else means.get("backward", 0.0),
    )


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part."""
    return {part: fmean(parts[part] for parts in found) for part in (found[0] if found else ())}


def _last_sent(ranks: Mapping[int, RankStep]) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Return for each reduction the rank that sent its bucket last, and when."""
    last: dict[tuple[str, int, int], tuple[int, int]] = {}
    for rank, step in ranks.items():
        for sent in step.buckets:
            if sent.reduction not in last or sent.sent > last[sent.reduction][1]:
                last[sent.reduction] = rank, sent.sent
    return last


def _durations(
    step: RankStep, last: Mapping[tuple[str, int, int], tuple[int, int]]
) -> Iterator[tuple[Sent, int]]:
    """Yield how long reductions took, where the rank can know it."""
    free, is_known = 0, True
    for sent in sorted(step.buckets, key=lambda one: one.wait_began):
        at = last[sent.reduction][1]
        has_waited = sent.reduced > sent.wait_began + 1  # otherwise it may have been reduced earlier
        if has_waited and (is_known or at >= free):
            yield sent, max(0, sent.reduced - max(at, free))
        free, is_known = sent.reduced, has_waited


def _late(
    caused: Counter[int], parts: Mapping[int, Mapping[str, float]], num_steps: int
) -> LateRankFigures | None:
    total = caused.total()
    if len(parts) < 2 or not total:
        return None
    [(rank, most)] = caused.most_common(1)
    phases = {
        one: {**{phase: own[phase] for phase in PHASES}, "other": sum(own[part] for part in _CALLS)}
        for one, own in parts.items()
    }
    usual = {p: median(own[p] for other, own in phases.items() if other != rank) for p in phases[rank]}
    phase = max(usual, key=lambda p: phases[rank][p] - usual[p])
    return LateRankFigures(
        rank=rank,
        caused=most / num_steps / (len(phases) - 1),
        share=most / total,
        phase=phase,
        phase_time=phases[rank][phase],
        usual_time=usual[phase],
    )


def _bucket(
    found: Sequence[tuple[Sent, float, float, int]], durations: Sequence[int], num_rank_steps: int
) -> BucketFigures:
    """Return the figures of a bucket, as it is in the last step in which it was sent.

    Args:
        found: each time that a rank has sent it, with its waits for a late rank and for the transfer, and the rank that
            sent it last.
        durations: how long its reductions took, where ranks could know it.
        num_rank_steps: the number of steps of all ranks together, by which sums are divided.
    """
    sends, late, transfer, last_ranks = zip(*found, strict=True)
    [(rank, num_last)] = Counter(last_ranks).most_common(1)
    return BucketFigures(
        bucket=sends[-1].bucket,
        payload_bytes=sends[-1].payload_bytes,
        parameters=tuple(sends[-1].parameters),
        late=sum(late) / num_rank_steps,
        transfer=sum(transfer) / num_rank_steps,
        duration=median(durations) if durations else 0.0,
        sent=fmean(one.sent - one.began for one in sends),
        waits_for=rank if num_last > len(sends) / 2 else None,
    )


_REACTIONS = {
    "raised": "the error was raised on all ranks",
    "repaired": "the values of the majority were sent to all ranks",
    "warned": "training continued with values that differ",
}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A value that a check found to differ between replicas, in one step or in several."""

    step: int
    """The step in which it was found first."""
    row: rows.DivergenceRow
    """The row that was recorded when it was found first."""
    num_found: int
    """How often it was found."""

    @property
    def fact(self) -> str:
        """A clause that says what was found, and what the check did."""
        row, more = self.row, self.row.num_differing - 1
        others = f" and {format_count(more, 'other value')}" if more > 0 else ""
        where = f" in {row.tensor}{others}" if row.tensor else ""
        again = f", and was found {self.num_found} times" if self.num_found > 1 else ""
        return f"the replicas differ{where}; {_REACTIONS.get(row.outcome, row.outcome)}{again}"

    @property
    def detail(self) -> str:
        """Sentences about the check that found it, the ranks in the minority, and the last time of equal values."""
        row = self.row
        text = f"Found by {row.check}."
        if row.minority_ranks:
            text += f" In the minority: {describe_ranks(row.minority_ranks)}."
        elif row.tensor:
            text += " No value had a majority, so any rank may have the wrong one."
        if row.tensor and row.agreed_at_step is not None:
            when = f"at step {row.agreed_at_step}" if row.agreed_at_step else "when the module was wrapped"
            text += f" All ranks last agreed on {row.tensor} {when}."
        return text


def divergences_in(run: Run) -> list[Divergence]:
    """Return the values that differed, in the order of steps, each once for each check and reaction."""
    # All ranks record what was found, and it is the same on all of them.
    once: dict[tuple[object, ...], tuple[int, rows.DivergenceRow]] = {}
    for one in run.processes:
        last, nth = 0, 0
        for row in one.found:
            if isinstance(row, rows.BackwardRow):
                if row.step != last:
                    last, nth = row.step, 0
            elif isinstance(row, rows.DivergenceRow):
                nth += 1  # several in one step, such as two calls of sl.check_replicas
                step = last if row.step is None else row.step
                once.setdefault((step, nth, row.check, row.tensor), (step, row))
    found: dict[tuple[str, str, str], list[tuple[int, rows.DivergenceRow]]] = {}
    for step, row in sorted(once.values(), key=lambda one: one[0]):
        found.setdefault((row.check, row.tensor, row.outcome), []).append((step, row))
    return [Divergence(step=same[0][0], row=same[0][1], num_found=len(same)) for same in found.values()]
