"""The ledger, which stores the facts about the last backward and builds a record of them on request.

Facts are stored in each backward, and to store them must cost next to nothing. So the ledger stores only references to
objects and plain values. `Ledger.last` looks up the names of parameters and builds the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.gradients.backward import Backward
from syncline.gradients.bucket import Bucket
from syncline.gradients.step_times import Measured
from syncline.records import BackwardRecord, BucketRecord, NonFiniteRecord


class Ledger:
    """A store for the facts about the most recent backward, from which its record is built.

    Args:
        names: the parameters' names, by index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._backward: Backward | None = None
        self._ended_at = 0.0
        self._timing: Measured | None = None
        self._facts: dict[str, Any] = {}
        """The fields of the record that are stored when the backward ends. The other fields are computed on request."""

    def note(
        self,
        backward: Backward,
        *,
        step: int,
        divisor: int,
        facts: Mapping[str, Any],
        timing: Measured | None,
    ) -> None:
        """Store the facts about a backward that has ended.

        Args:
            backward: the backward, which must not be changed afterwards.
            step: number of steps of the run so far.
            divisor: the number by which the sums of the gradients were divided.
            facts: the fields of the record that the riders provide, by name.
            timing: the times of the step; None if the backward was not reduced.
        """
        self._backward, self._ended_at, self._timing = backward, time.perf_counter(), timing
        self._facts = {
            "step": step,
            "divisor": divisor,
            "counted_items": backward.num_items is not None,
            "reduced_afterwards": False,
            **facts,
        }

    def note_reduction(self, *, num_items: int | None, num_ranks: int) -> None:
        """Record that the gradients in `.grad` were reduced after the backward had ended.

        Args:
            num_items: the number of items by which the sums were divided; None if they were divided by `num_ranks`.
            num_ranks: the number of ranks.
        """
        divisor = num_ranks if num_items is None else num_items
        self._facts.update(divisor=divisor, counted_items=num_items is not None, reduced_afterwards=True)

    def note_nonfinite(self, nonfinite: NonFiniteRecord | None) -> None:
        """Replace the record of values that are not finite, because `.grad` was checked again after the backward."""
        self._facts["nonfinite"] = nonfinite

    def last(self) -> BackwardRecord | None:
        """Return the record of the most recent backward. Returns None if there was no backward yet."""
        return None if self._backward is None else self.present()

    def present(self) -> BackwardRecord:
        """Return the record of the most recent backward. There must have been one."""
        backward = self._backward
        assert backward is not None
        ready, buckets = backward.ready, backward.sent
        position = {index: at for at, index in enumerate(ready)}
        return BackwardRecord(
            synchronized=bool(buckets),
            num_gradients=len(ready),
            unused=tuple(name for i, name in enumerate(self._names) if i not in position),
            num_reduced=sum(bucket.plan.num_gradient_elements for bucket in buckets),
            buckets=tuple(self._bucket(bucket, position, backward.began_at) for bucket in buckets),
            duration_seconds=self._ended_at - backward.began_at,
            timing=None if self._timing is None else self._timing.record(),
            **self._facts,
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
