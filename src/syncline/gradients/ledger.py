"""The ledger: a record of what was reduced in the last backward.

Recording must cost next to nothing. It keeps only references and numbers; `Ledger.last` looks up names and builds
the record on request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from syncline.gradients.bucket import Lifecycle
from syncline.records import BackwardRecord, BucketRecord, NonFiniteRecord

__all__ = ["Ledger"]


class Ledger:
    """A record of the most recent backward.

    Args:
        names: the parameters' names, by index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ready: list[int] | None = None
        self._began_at = self._ended_at = 0.0
        self._step = 0
        self._divisor = 1
        self._counted_items = False
        self._buckets: Sequence[Lifecycle] = ()
        self._reduced_afterwards = False
        self._nonfinite: NonFiniteRecord | None = None
        self._metrics: Mapping[str, float] = {}

    def note(
        self,
        *,
        step: int,
        ready: list[int],
        began_at: float,
        divisor: int,
        counted_items: bool,
        buckets: Sequence[Lifecycle],
        nonfinite: NonFiniteRecord | None = None,
        metrics: Mapping[str, float],
    ) -> None:
        """Record a backward that has ended.

        Args:
            step: number of synchronized backwards so far.
            ready: parameter indices in the order in which their gradients became ready. The ledger keeps this list, so
                the caller must not change it afterwards.
            began_at: `time.perf_counter()` at the first gradient.
            divisor: the number by which the sums were divided.
            counted_items: whether the divisor is a number of items.
            buckets: the reduced buckets; empty if nothing was sent.
            nonfinite: the values found that are not finite; None if there was no check.
            metrics: the means over ranks that were reported with it.
        """
        self._step, self._ready = step, ready
        self._began_at, self._ended_at = began_at, time.perf_counter()
        self._divisor, self._counted_items = divisor, counted_items
        self._buckets = buckets
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
        if self._ready is None:
            return None
        position = {index: at for at, index in enumerate(self._ready)}
        return BackwardRecord(
            step=self._step,
            synchronized=bool(self._buckets),
            num_gradients=len(self._ready),
            unused=tuple(name for i, name in enumerate(self._names) if i not in position),
            divisor=self._divisor,
            counted_items=self._counted_items,
            reduced_afterwards=self._reduced_afterwards,
            num_reduced=sum(bucket.plan.num_gradient_elements for bucket in self._buckets),
            buckets=tuple(self._bucket(bucket, position) for bucket in self._buckets),
            duration_seconds=self._ended_at - self._began_at,
            nonfinite=self._nonfinite,
            metrics=self._metrics,
        )

    def _bucket(self, bucket: Lifecycle, position: dict[int, int]) -> BucketRecord:
        in_order = sorted(bucket.plan.parameters, key=lambda i: position.get(i, len(position)))
        return BucketRecord(
            index=bucket.plan.index,
            payload_bytes=bucket.plan.payload_bytes,
            parameters=tuple(self._names[i] for i in in_order),
            trigger=None if bucket.trigger is None else self._names[bucket.trigger],
            launched_seconds=bucket.launched_at - self._began_at,
            waited_seconds=bucket.waited_seconds,
        )
