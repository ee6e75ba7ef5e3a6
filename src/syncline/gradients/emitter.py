"""The events of a reducer: gradients that are ready, buckets that are sent and reduced, and backwards that have ended.

The places that call this emitter first look whether an observer wants the event (`OBSERVERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from syncline.events import (
    OBSERVERS,
    BackwardEnded,
    BucketReduced,
    BucketSent,
    GradientReady,
    RankFoundSlow,
    Source,
    emit,
)
from syncline.gradients.backward import Backward
from syncline.gradients.bucket import Bucket
from syncline.gradients.bucket_plan import BucketPlan
from syncline.records import BackwardRecord, StragglerRecord


class Emitter:
    """An object that emits the events of one reducer.

    Args:
        source: the wrapped module and the rank.
        names: the names of the parameters, by index.
        num_ranks: the number of ranks that train together.
        looks_for_unused: whether each backward looks for parameters that it does not reach.
        former: the emitter of the reducer that this one replaces; None if there is none.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        *,
        num_ranks: int,
        looks_for_unused: bool,
        former: Emitter | None = None,
    ) -> None:
        self.source = source
        self._names, self._num_ranks, self._looks_for_unused = names, num_ranks, looks_for_unused
        self._plans: list[BucketPlan] = []
        self._layout: int = 0 if former is None else former._layout

    def observed_list(self, step: int) -> list[int]:
        """Return an empty list for the indices of ready gradients, which emits an event for each of them."""
        return _ObservedList(self, step)

    def gradient_ready(self, step: int, index: int) -> None:
        """Emit that the gradient of the parameter at `index` is ready."""
        emit(OBSERVERS.gradient_ready, GradientReady(self.source, step, self._names[index], perf_counter()))

    def bucket_sent(self, step: int, bucket: Bucket) -> None:
        """Emit that a bucket was sent."""
        trigger = None if bucket.trigger is None else self._names[bucket.trigger]
        plan, at = bucket.plan, bucket.launched_at
        emit(
            OBSERVERS.bucket_sent, BucketSent(self.source, step, plan.index, plan.payload_bytes, trigger, at)
        )

    def bucket_reduced(self, step: int, bucket: Bucket) -> None:
        """Emit that this rank has waited for a bucket."""
        began_at = bucket.reduced_at - bucket.waited_seconds
        emit(
            OBSERVERS.bucket_reduced,
            BucketReduced(self.source, step, bucket.plan.index, began_at, bucket.reduced_at),
        )

    def backward_ended(
        self,
        backward: Backward,
        metrics: Mapping[str, float],
        record: Callable[[], BackwardRecord],
        *,
        ends_step: bool,
    ) -> None:
        """Emit that a backward has ended.

        Args:
            backward: the backward.
            metrics: the means of the metrics that were reported.
            record: a function that returns its record.
            ends_step: whether a step ends with it.
        """
        sent = backward.sent
        plans = [one.plan for one in sent]
        if plans and plans != self._plans:
            self._plans, self._layout = plans, self._layout + 1
        buckets = [
            (one.plan.index, one.launched_at, one.reduced_at - one.waited_seconds, one.reduced_at)
            for one in sent
        ]
        event = BackwardEnded(
            source=self.source,
            step=backward.step,
            began_at=backward.began_at,
            ended_at=perf_counter(),
            is_synchronized=bool(buckets),
            buckets=tuple(buckets),
            layout=self._layout,
            metrics=metrics,
            looks_for_unused=self._looks_for_unused,
            unused=() if len(backward.ready) >= len(self._names) else self._unused(backward.ready),
            record=record,
            num_ranks=self._num_ranks,
            ends_step=ends_step,
        )
        for receive in OBSERVERS.backward_ended:
            receive(event)

    def _unused(self, ready: Sequence[int]) -> tuple[str, ...]:
        seen = set(ready)
        return tuple(name for index, name in enumerate(self._names) if index not in seen)

    def rank_found_slow(self, slow: StragglerRecord) -> None:
        """Emit that a rank is slow in many steps."""
        emit(OBSERVERS.rank_found_slow, RankFoundSlow(self.source, slow))


class _ObservedList(list[int]):
    """A list that emits an event for each index that is appended."""

    def __init__(self, emitter: Emitter, step: int) -> None:
        super().__init__()
        self._emitter, self._step = emitter, step

    def append(self, index: int) -> None:
        super().append(index)
        self._emitter.gradient_ready(self._step, index)
