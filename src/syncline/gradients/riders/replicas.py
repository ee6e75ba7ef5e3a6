"""Rider: the fingerprint of a slice of the replica, see `replica_watch.py`."""

from __future__ import annotations

from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.replica_watch import NUM_FINGERPRINT_BITS, ReplicaWatch

__all__ = ["Replicas"]

_NUM_SAMPLES = 64
"""Elements of each bucket that are looked at."""


class Replicas(Rider):
    """Reports the fingerprint of the slice whose turn it is."""

    num_bits = NUM_FINGERPRINT_BITS

    def __init__(self) -> None:
        self.watch: ReplicaWatch | None = None
        """What compares them; None where that was not asked for."""
        self._reported: list[int] | None = None

    def begin_step(self, step: int) -> None:
        """Hash the slice before anything writes."""
        if self.watch is not None:
            at = step - self.watch.steps_before
            self.watch.begin(range(at, at + 1))

    def word(self) -> int:
        """Return the fingerprint; 0 if nothing has its turn."""
        return 0 if self.watch is None else self.watch.fingerprint()

    def hear(self, words: Words) -> None:
        """Keep the fingerprints: replicas are compared last, for `.grad` may be applied all the same."""
        self._reported = None if words.any_joined else list(words.active.values())

    def conclude(self, reduced: Reduced) -> None:
        """Compare the replicas.

        Raises:
            ReplicaDivergence: they differ, and so it was wanted; on every rank.
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
        """The backward is over."""
        self._reported = None
        if self.watch is not None:
            self.watch.forget()


def _looks_finite(bucket: Holder) -> bool:
    """Return whether some elements of what was reduced, evenly spread, are all finite."""
    values, _ = bucket.handed_out()
    return bool(values[:: max(1, len(values) // _NUM_SAMPLES)].isfinite().all())
