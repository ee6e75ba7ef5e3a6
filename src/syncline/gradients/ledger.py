"""The ledger, which stores the facts about the last backward, builds a record of them on request, and emits events.

Facts are stored in each backward, and to store them must cost next to nothing. So the ledger stores only references to
objects and plain values. `Ledger.last` looks up the names of parameters and builds the record.

The places that emit other events first look whether an observer wants the event (`OBSERVERS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

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
from syncline.gradients.step_times import Measured
from syncline.records import BackwardRecord, BucketRecord, NonFiniteRecord, StragglerRecord


@dataclass(frozen=True, slots=True)
class _Noted:
    """The facts about one backward that has ended."""

    backward: Backward
    ended_at: float
    timing: Measured | None
    facts: dict[str, Any]
    """The fields of the record that are stored when the backward ends. The other fields are computed on request."""
    names: Sequence[str]

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank."""
        if len(self.backward.ready) >= len(self.names):
            return ()
        seen = set(self.backward.ready)
        return tuple(name for index, name in enumerate(self.names) if index not in seen)

    def record(self) -> BackwardRecord:
        """Return the record of the backward."""
        backward, buckets = self.backward, self.backward.sent
        position = {index: at for at, index in enumerate(backward.ready)}
        return BackwardRecord(
            synchronized=bool(buckets),
            num_gradients=len(backward.ready),
            unused=self.unused,
            num_reduced=sum(bucket.plan.num_gradient_elements for bucket in buckets),
            buckets=tuple(self._bucket(bucket, position) for bucket in buckets),
            duration_seconds=self.ended_at - backward.began_at,
            timing=None if self.timing is None else self.timing.record(),
            **self.facts,
        )

    def _bucket(self, bucket: Bucket, position: Mapping[int, int]) -> BucketRecord:
        in_order = sorted(bucket.plan.parameters, key=lambda i: position.get(i, len(position)))
        return BucketRecord(
            index=bucket.plan.index,
            payload_bytes=bucket.plan.payload_bytes,
            parameters=tuple(self.names[i] for i in in_order),
            trigger=None if bucket.trigger is None else self.names[bucket.trigger],
            launched_seconds=bucket.launched_at - self.backward.began_at,
            waited_seconds=bucket.waited_seconds,
        )


class Ledger:
    """A store for the facts about the last backward of a wrapper, which also emits the events of its backwards."""

    source: Source
    """The wrapped module and the rank."""

    def __init__(self) -> None:
        self._num_layouts = 0
        """The number of layouts of buckets that observers have seen."""

    def use(self, source: Source, names: Sequence[str], *, num_ranks: int, looks_for_unused: bool) -> None:
        """Record the backwards of another reducer from now on.

        Args:
            source: the wrapped module and the rank.
            names: the names of the parameters, by index.
            num_ranks: the number of ranks that train together.
            looks_for_unused: whether each backward looks for parameters that it does not reach.
        """
        self.source = source
        self._names, self._num_ranks, self._looks_for_unused = names, num_ranks, looks_for_unused
        self._plans: list[BucketPlan] = []
        self._last: _Noted | None = None

    def note(
        self,
        backward: Backward,
        *,
        step: int,
        divisor: int,
        facts: Mapping[str, Any],
        timing: Measured | None,
    ) -> None:
        """Store the facts about a backward that has ended, and emit that it has ended.

        Args:
            backward: the backward, which must not be changed afterwards.
            step: number of steps of the run so far.
            divisor: the number by which the sums of the gradients were divided.
            facts: the fields of the record that the riders provide, by name.
            timing: the times of the step; None if the backward was not reduced.
        """
        facts = {
            "step": step,
            "divisor": divisor,
            "counted_items": backward.num_items is not None,
            "reduced_afterwards": False,
            **facts,
        }
        self._last = _Noted(backward, perf_counter(), timing, facts, self._names)
        if OBSERVERS.backward_ended:
            self._backward_ended(self._last)

    def note_reduction(self, *, num_items: int | None, num_ranks: int) -> None:
        """Record that the gradients in `.grad` were reduced after the backward had ended.

        Args:
            num_items: the number of items by which the sums were divided; None if they were divided by `num_ranks`.
            num_ranks: the number of ranks.
        """
        if self._last is not None:
            divisor = num_ranks if num_items is None else num_items
            self._last.facts.update(
                divisor=divisor, counted_items=num_items is not None, reduced_afterwards=True
            )

    def note_nonfinite(self, nonfinite: NonFiniteRecord | None) -> None:
        """Replace the record of values that are not finite, because `.grad` was checked again after the backward."""
        if self._last is not None:
            self._last.facts["nonfinite"] = nonfinite

    def last(self) -> BackwardRecord | None:
        """Return the record of the most recent backward. Returns None if there was no backward yet."""
        return None if self._last is None else self._last.record()

    # ------------------------------------------------------------------ events

    def _backward_ended(self, noted: _Noted) -> None:
        backward = noted.backward
        plans = [one.plan for one in backward.sent]
        if plans and plans != self._plans:
            self._plans, self._num_layouts = plans, self._num_layouts + 1
        buckets = [
            (one.plan.index, one.launched_at, one.reduced_at - one.waited_seconds, one.reduced_at)
            for one in backward.sent
        ]
        event = BackwardEnded(
            source=self.source,
            step=backward.step,
            began_at=backward.began_at,
            ended_at=noted.ended_at,
            is_synchronized=bool(buckets),
            buckets=tuple(buckets),
            layout=self._num_layouts,
            metrics=noted.facts.get("metrics", {}),
            looks_for_unused=self._looks_for_unused,
            unused=noted.unused,
            record=noted.record,
            num_ranks=self._num_ranks,
            ends_step=noted.facts["step"] == backward.step,
        )
        for receive in OBSERVERS.backward_ended:
            receive(event)

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

    def rank_found_slow(self, slow: StragglerRecord) -> None:
        """Emit that a rank is slow in many steps."""
        emit(OBSERVERS.rank_found_slow, RankFoundSlow(self.source, slow))


class _ObservedList(list[int]):
    """A list that emits an event for each index that is appended."""

    def __init__(self, ledger: Ledger, step: int) -> None:
        super().__init__()
        self._ledger, self._step = ledger, step

    def append(self, index: int) -> None:
        super().append(index)
        self._ledger.gradient_ready(self._step, index)
