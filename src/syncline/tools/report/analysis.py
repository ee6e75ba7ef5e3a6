"""The figures of a run: where a step's time goes, which rank and which bucket others wait for (pure functions)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from syncline.tools.report.run import Run
from syncline.tools.report.steps import RankStep, Sent

PHASES = ("data", "forward", "backward", "update")
"""The phases in which a rank works."""

_PHASE_OF = {
    "data": "data",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "update": "update",
    "optimizer": "update",
}

EXPOSED = ("late", "transfer", "buffers", "sync", "call")
"""The parts of a step in which a rank waits for others, or for the transport."""


ENOUGH_STEPS = 10
"""From so many steps on, figures are the ground of a verdict. Fewer say more about chance."""

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
    """The part of all waits for late ranks that this rank causes."""
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
        """Whether these are enough steps for a verdict."""
        return self.num_steps >= ENOUGH_STEPS and self.num_steps * self.step >= _ENOUGH_MICROS

    def share(self, *parts: str) -> float:
        """Return which part of a step these parts take."""
        return sum(self.parts.get(part, 0.0) for part in parts) / max(1.0, self.step)

    @property
    def exposed(self) -> float:
        """The part of a step in which ranks wait for others, or for the transport."""
        return self.share(*EXPOSED)


def figures_of(run: Run, steps: Sequence[int] | None = None) -> Figures | None:
    """Return the figures of a run.

    Args:
        run: the run.
        steps: the steps to look at; None for all steady ones.

    Returns:
        The figures, or None if no complete step was recorded.
    """
    chosen = run.steady if steps is None else list(steps)
    if not chosen:
        return None
    parts: dict[str, list[float]] = defaultdict(list)
    phases: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    caused: dict[int, float] = defaultdict(float)
    buckets = _Buckets()
    payloads, backwards = [], []
    others: dict[int, float] = defaultdict(float)
    for number in chosen:
        ranks = run.steps[number]
        last = _last_sent(ranks)
        for rank, step in ranks.items():
            late, transfer = 0.0, 0.0
            for sent in step.buckets:
                to_rank, at = last[_once(sent)]
                waited = max(0, sent.reduced - sent.wait_began)
                for_rank = min(waited, max(0, at - sent.wait_began)) if to_rank != rank else 0
                late += for_rank
                transfer += waited - for_rank
                caused[to_rank] += for_rank
                buckets.add(sent, for_rank, waited - for_rank, to_rank)
            for kind in ("sync", "call", "buffers"):
                parts[kind].append(step.total(kind))
                others[rank] += step.total(kind) / len(chosen)
            began = [one.wait_began - one.began for one in step.buckets if one.module == run.module]
            backwards += [min(began)] if began else []
            own = dict.fromkeys(PHASES, 0.0)
            for span in step.spans:
                if span.kind in _PHASE_OF:
                    own[_PHASE_OF[span.kind]] += span.length
            for phase in PHASES:
                parts[phase].append(own[phase])
                phases[rank][phase].append(own[phase])
            parts["late"].append(late)
            parts["transfer"].append(transfer)
            payloads.append(step.payload_bytes + sum(sent.row[1] for sent in step.buckets if sent.row))
        buckets.end_step(ranks, last)
    means = {part: fmean(values) for part, values in parts.items()}
    of_ranks = {rank: {p: fmean(v) for p, v in own.items()} for rank, own in phases.items()}
    return Figures(
        num_steps=len(chosen),
        parts=means,
        phases_of_ranks=of_ranks,
        late=_late(
            caused, {rank: {**own, "other": others[rank]} for rank, own in of_ranks.items()}, len(chosen)
        ),
        buckets=buckets.figures(len(payloads)),
        payload_bytes=fmean(payloads),
        backward=fmean(backwards) if backwards else means["backward"],
    )


Key = tuple[str, int]

Once = tuple[str, int, int]


def _key(sent: Sent) -> Key:
    return sent.module, sent.bucket


def _once(sent: Sent) -> Once:
    """Return the key of one reduction: a module can have several backwards in a step of the main one."""
    return sent.module, sent.step, sent.bucket


def _last_sent(ranks: Mapping[int, RankStep]) -> dict[Once, tuple[int, int]]:
    """Return for each reduction the rank that sent its bucket last, and when."""
    last: dict[Once, tuple[int, int]] = {}
    for rank, step in ranks.items():
        for sent in step.buckets:
            if _once(sent) not in last or sent.sent > last[_once(sent)][1]:
                last[_once(sent)] = rank, sent.sent
    return last


def _late(
    caused: Mapping[int, float], phases: Mapping[int, Mapping[str, float]], num_steps: int
) -> LateRankFigures | None:
    total = sum(caused.values())
    if len(phases) < 2 or not total:
        return None
    rank = max(caused, key=lambda one: caused[one])
    if rank not in phases:
        return None
    names = (*PHASES, "other")
    usual = {p: median(own[p] for other, own in phases.items() if other != rank) for p in names}
    phase = max(names, key=lambda p: phases[rank][p] - usual[p])
    return LateRankFigures(
        rank=rank,
        caused=caused[rank] / num_steps / (len(phases) - 1),
        share=caused[rank] / total,
        phase=phase,
        phase_time=phases[rank][phase],
        usual_time=usual[phase],
    )


class _Buckets:
    """The sums over steps for each bucket."""

    def __init__(self) -> None:
        self._late: dict[Key, list[float]] = defaultdict(list)
        self._transfer: dict[Key, list[float]] = defaultdict(list)
        self._duration: dict[Key, list[float]] = defaultdict(list)
        self._sent: dict[Key, list[float]] = defaultdict(list)
        self._last: dict[Key, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._latest: dict[Key, Sent] = {}

    def add(self, sent: Sent, late: float, transfer: float, last_rank: int) -> None:
        self._late[_key(sent)].append(late)
        self._transfer[_key(sent)].append(transfer)
        self._last[_key(sent)][last_rank] += 1
        self._sent[_key(sent)].append(sent.sent - sent.began)
        self._latest[_key(sent)] = sent

    def end_step(self, ranks: Mapping[int, RankStep], last: Mapping[Once, tuple[int, int]]) -> None:
        for step in ranks.values():
            free, is_known = 0, True
            for sent in sorted(step.buckets, key=lambda one: one.wait_began):
                at = last[_once(sent)][1]
                has_waited = sent.reduced > sent.wait_began + 1  # otherwise it may have been reduced earlier
                if has_waited and (is_known or at >= free):
                    self._duration[_key(sent)].append(max(0, sent.reduced - max(at, free)))
                free, is_known = sent.reduced, has_waited

    def figures(self, num_rank_steps: int) -> list[BucketFigures]:
        """Return the figures of the buckets, as they are in the last step in which they were sent.

        Args:
            num_rank_steps: the number of steps of all ranks together, by which sums are divided.
        """
        found = []
        for key, sent in self._latest.items():
            row, last, durations = sent.row, self._last[key], self._duration[key]
            rank = max(last, key=lambda one: last[one])
            found.append(
                BucketFigures(
                    bucket=sent.bucket,
                    payload_bytes=row[1] if row else 0,
                    parameters=tuple(row[2]) if row else (),
                    late=sum(self._late[key]) / num_rank_steps,
                    transfer=sum(self._transfer[key]) / num_rank_steps,
                    duration=median(durations) if durations else 0.0,
                    sent=fmean(self._sent[key]),
                    waits_for=rank if last[rank] > sum(last.values()) / 2 else None,
                )
            )
        return found
