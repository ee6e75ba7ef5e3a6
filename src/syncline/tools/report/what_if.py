"""What a step would take with other buckets, or with fewer bytes (pure functions).

The model of a step: gradients become ready during the backward, a bucket is sent as soon as its gradients are ready,
and buckets are reduced one after the other. A reduction takes a fixed time and a time for its bytes. The step waits
for what is left when the backward has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import NamedTuple

from syncline.tools.plan import Reduction, exposed_time
from syncline.tools.report.analysis import BucketFigures

CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)
"""The values of `bucket_cap_mb` that are compared."""

_BYTES_PER_MB = 1 << 20

_LEAST_POINTS = 3


class Link(NamedTuple):
    """How long a reduction takes: a fixed time, and a time for each byte."""

    fixed: float
    per_byte: float

    def time(self, num_bytes: float) -> float:
        """Return how long the reduction of so many bytes takes."""
        return self.fixed + self.per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth without the fixed time, if times are in microseconds."""
        return 1e6 / self.per_byte if self.per_byte > 0 else float("inf")


def link_of(buckets: Sequence[BucketFigures]) -> Link | None:
    """Return the line that fits the durations of the buckets best. None if no duration is known.

    Buckets for which no rank had to wait have no known duration. If all buckets are of about the same size, the whole
    time is attributed to the bytes.
    """
    points = [(one.payload_bytes, one.duration) for one in buckets if one.duration > 0 and one.payload_bytes]
    if not points:
        return None
    sizes, times = [size for size, _ in points], [time for _, time in points]
    through_zero = Link(0.0, sum(times) / sum(sizes))
    if len(points) < _LEAST_POINTS or max(sizes) < 2 * min(sizes):
        return through_zero
    slope, fixed = linear_regression(sizes, times)
    if slope <= 0:
        return Link(fmean(times), 0.0)
    return Link(fixed, slope) if fixed > 0 else through_zero


def wait_of(link: Link, buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """Return how long a step waits for buckets after the backward, in microseconds.

    Args:
        link: how long a reduction takes.
        buckets: for each bucket, when it is sent, and its bytes, in the order in which they are sent.
        backward: how long the backward takes.

    Examples:
        >>> wait_of(Link(0.0, 1.0), [(10.0, 20.0), (50.0, 20.0)], backward=50.0)
        20.0
    """
    return exposed_time([Reduction(sent, link.time(num_bytes)) for sent, num_bytes in buckets], backward)


def cut_anew(buckets: Sequence[BucketFigures], cap_bytes: float) -> list[tuple[float, float]]:
    """Return when buckets of another size would be sent, and their bytes.

    Gradients are taken to become ready evenly between the moments at which the recorded buckets were sent.
    """
    total = sum(one.payload_bytes for one in buckets)
    cuts = [0.0, *(min(cap_bytes * nth, total) for nth in range(1, math.ceil(total / cap_bytes) + 1))]
    return [(_ready(cut, buckets), cut - before) for before, cut in pairwise(cuts)]


def _ready(at: float, buckets: Sequence[BucketFigures]) -> float:
    """Return when so many bytes of gradients are ready."""
    start, since = 0.0, 0.0
    for one in buckets:
        end, until = start + one.payload_bytes, max(one.sent, since)
        if at <= end:
            return since + (until - since) * (at - start) / (end - start)
        start, since = end, until
    return since


def best_cap(link: Link, buckets: Sequence[BucketFigures], backward: float) -> tuple[float, float] | None:
    """Return the bucket size in MiB with the shortest wait, and the time that a step saves, in microseconds.

    None if no other size is shorter.
    """
    ordered = sorted(buckets, key=lambda one: one.sent)
    present = wait_of(link, [(one.sent, one.payload_bytes) for one in ordered], backward)
    waits = {cap: wait_of(link, cut_anew(ordered, cap * _BYTES_PER_MB), backward) for cap in CAPS_MB}
    # The largest of those that are nearly as good: fewer buckets have less overhead that the model does not know.
    shortest = min(waits.values())
    cap = max(one for one, wait in waits.items() if wait <= shortest + 0.02 * max(1.0, present))
    return (cap, present - waits[cap]) if waits[cap] < present else None
