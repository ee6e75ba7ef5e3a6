"""What a step would take with other buckets, or with fewer bytes (pure functions).

The model of a step: gradients become ready during the backward, a bucket is sent as soon as its gradients are ready,
and buckets are reduced one after the other. A reduction takes a fixed time and a time for its bytes. The step waits
for what is left when the backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.tools.plan import Link, Reduction, exposed_time
from syncline.tools.report.analysis import BucketFigures

CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)
"""The values of `bucket_cap_mb` that are compared."""

_BYTES_PER_MB = 1 << 20

_LEAST_POINTS = 3


def link_of(buckets: Sequence[BucketFigures]) -> Link | None:
    """Return the line that fits the durations of the buckets best. None if no duration is known.

    Buckets for which no rank had to wait have no known duration. If all buckets are of about the same size, the whole
    time is attributed to the bytes.
    """
    points = [(one.payload_bytes, one.duration) for one in buckets if one.duration > 0 and one.payload_bytes]
    if not points:
        return None
    num, sizes, times = len(points), [size for size, _ in points], [time for _, time in points]
    mean_size, mean_time = sum(sizes) / num, sum(times) / num
    spread = sum((size - mean_size) ** 2 for size in sizes)
    if num < _LEAST_POINTS or max(sizes) < 2 * min(sizes) or not spread:
        return Link(0.0, sum(times) / sum(sizes))
    slope = sum((size - mean_size) * (time - mean_time) for size, time in points) / spread
    if slope <= 0:
        return Link(mean_time, 0.0)
    fixed = mean_time - slope * mean_size
    return Link(fixed, slope) if fixed > 0 else Link(0.0, sum(times) / sum(sizes))


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
    sizes = [float(one.payload_bytes) for one in buckets]
    times = [one.sent for one in buckets]
    ends, total = [], 0.0
    for size in sizes:
        total += size
        ends.append(total)
    cuts, at = [], cap_bytes
    while at < total:
        cuts.append(at)
        at += cap_bytes
    cuts.append(total)
    found, before = [], 0.0
    for cut in cuts:
        found.append((_ready(cut, ends, times), cut - before))
        before = cut
    return found


def _ready(at: float, ends: Sequence[float], times: Sequence[float]) -> float:
    """Return when so many bytes of gradients are ready."""
    start, since = 0.0, 0.0
    for end, time in zip(ends, times, strict=True):
        if at <= end:
            return since + (max(time, since) - since) * (at - start) / (end - start)
        start, since = end, max(time, since)
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
