"""Rider: the fingerprint of a slice of the replica (see `replica_watch.py`)."""

from __future__ import annotations

from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.replica_watch import NUM_FINGERPRINT_BITS, ReplicaWatch

_NUM_SAMPLES = 64
"""Number of elements of each bucket that are checked for finiteness."""


class Replicas(Rider):
    """A report of the fingerprint of the slice of the replica that this step compares."""

    num_bits = NUM_FINGERPRINT_BITS

    def __init__(self) -> None:
        self.watch: ReplicaWatch | None = None
        """The object that compares replicas; None without `replica_check`."""
        self._reported: list[int] | None = None

    def use(self, watch: ReplicaWatch | None) -> None:
        """Compare replicas by `watch` from now on. `watch` takes over the state of its predecessor."""
        if watch is not None and self.watch is not None:
            watch.continues(self.watch)
        self.watch = watch

    def begin_step(self, step: int) -> None:
        """Hash the slice of this step, before parameters or optimizer state change."""
        if self.watch is not None:
            at = step - self.watch.steps_before
            self.watch.begin(range(at, at + 1))

    def word(self, backward: Backward) -> int:
        """Return the fingerprint; 0 if no part of the replica is compared in this step."""
        return 0 if self.watch is None else self.watch.fingerprint()

    def receive(self, words: Words) -> None:
        """Keep the fingerprints for `conclude`."""
        # Replicas are compared last, because under "repair" and "warn" the optimizer steps all the same.
        self._reported = None if words.any_joined else list(words.active.values())

    def conclude(self, reduced: Reduced) -> None:
        """Compare the replicas.

        Raises:
            ReplicaDivergence: replicas differ (see `ReplicaWatch.compare`). Raised on every rank.
        """
        if self.watch is None or self._reported is None:
            return
        step = reduced.step - self.watch.steps_before
        self.watch.compare(self._reported, step)
        if reduced.is_mean:
            dense = (bucket for bucket in reduced.buckets if not bucket.is_sparse)
            is_finite = not reduced.any_nonfinite and all(_looks_finite(bucket) for bucket in dense)
            self.watch.mean_is(is_finite, step)

    def forget(self) -> None:
        """Drop the fingerprints at the end of a backward."""
        self._reported = None
        if self.watch is not None:
            self.watch.forget()


def _looks_finite(bucket: Holder) -> bool:
    """Return whether a sample of the reduced elements, evenly spread, is finite."""
    values = (
        bucket.own()
    )  # this memory holds the result by now; `handed_out` would list all members of the bucket
    return bool(values[:: max(1, len(values) // _NUM_SAMPLES)].isfinite().all())
