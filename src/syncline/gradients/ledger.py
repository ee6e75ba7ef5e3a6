"""The ledger: a record of what was reduced in the last backward.

Recording must cost next to nothing. It keeps only references and numbers; `Ledger.last` looks up names and builds
the record on request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from syncline.gradients.backward import Backward
from syncline.gradients.bucket import Bucket
from syncline.records import BackwardRecord, BucketRecord, NonFiniteRecord


class Ledger:
    """A record of the most recent backward.

    Args:
        names: the parameters' names, by index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._backward: Backward | None = None
        self._step = 0
        self._ended_at = 0.0
        self._divisor = 1
        self._counted_items = False
        self._reduced_afterwards = False
        self._nonfinite: NonFiniteRecord | None = None
        self._metrics: Mapping[str, float] = {}

    def note(
        self,
        backward: Backward,
        *,
        step: int,
        divisor: int,
        nonfinite: NonFiniteRecord | None = None,
        metrics: Mapping[str, float],
    ) -> None:
        """Record a backward that has ended.

        Args:
            backward: the backward; nothing may change it afterwards.
            step: number of synchronized backwards so far.
            divisor: the number by which the sums were divided.
            nonfinite: the values found that are not finite; None if there was no check.
            metrics: the means over ranks that were reported with it.
        """
        self._backward, self._step, self._ended_at = backward, step, time.perf_counter()
        self._divisor, self._counted_items = divisor, backward.num_items is not None
        self._metrics = metrics
        self._reduced_afterwards = False
        self._nonfinite = nonfinite

    def note_reduction(
        self, *, divisor: int, counted_items: bool, nonfinite: NonFiniteRecord | None = None
    ) -> None:
        """Record that gradients left in `.grad` were reduced after the backward; arguments as in `note`."""
        self._divisor, self._counted_items, self._reduced_afterwards = divisor, counted_items, True
        self._nonfinite = nonfinite

    def note_judgement(self, nonfinite: NonFiniteRecord) -> None:
        """Record that gradients left in `.grad` were checked for non-finite values after the backward."""
        self._nonfinite = nonfinite

    def last(self) -> BackwardRecord | None:
        """Return the record of the most recent backward, or None before the first."""
        backward = self._backward
        if backward is None:
            return None
        ready, buckets = backward.ready, backward.sent
        position = {index: at for at, index in enumerate(ready)}
        return BackwardRecord(
            step=self._step,
            synchronized=bool(buckets),
            num_gradients=len(ready),
            unused=tuple(name for i, name in enumerate(self._names) if i not in position),
            divisor=self._divisor,
            counted_items=self._counted_items,
            reduced_afterwards=self._reduced_afterwards,
            num_reduced=sum(bucket.plan.num_gradient_elements for bucket in buckets),
            buckets=tuple(self._bucket(bucket, position, backward.began_at) for bucket in buckets),
            duration_seconds=self._ended_at - backward.began_at,
            nonfinite=self._nonfinite,
            metrics=self._metrics,
        )

    def _bucket(self, bucket: Bucket, position: Mapping[int, int], began_at: float) -> BucketRecord:
        in_order = sorted(bucket.plan.parameters, key=lambda i: position.get(i, len(position)))
        return BucketRecord(
            index=bucket.plan.index,
            payload_bytes=bucket.plan.payload_bytes,
            parameters=tuple(self._names[i] for i in in_order),
            trigger=None if bucket.trigger is None else self._names[bucket.trigger],
            launched_seconds=bucket.launched_at - began_at,
            waited_seconds=bucket.waited_seconds,
        )
