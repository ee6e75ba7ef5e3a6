"""When the gradients of a step are sent, and how long the step waits for them (pure functions).

Gradients become ready during the backward. A bucket is sent as soon as its gradients are ready, and buckets cross the
link one after the other. The step waits for what has not arrived when the backward has ended.

Times can be in any unit, as long as all of them are in the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Reduction(NamedTuple):
    """One bucket on its way."""

    ready: float
    """When its last gradient is ready, after the beginning of a backward that nothing delays."""
    on_link: float
    """How long it occupies the link, so that the next bucket waits."""
    encoding: float = 0.0
    """The work before it is sent. The backward pauses meanwhile."""
    beside: float = 0.0
    """How long it needs before and after the link, while the next bucket can use the link."""
    stolen: float = 0.0
    """How long the backward stands still, because the transport needs this rank's core."""
    decoding: float = 0.0
    """The work after it has arrived, before the next bucket is decoded."""


def exposed_time(reductions: Sequence[Reduction], backward: float) -> float:
    """Return by how much the reductions make a backward longer, with the wait at its end.

    Args:
        reductions: the buckets, in the order in which they are sent.
        backward: how long the backward takes alone.

    Examples:
        >>> exposed_time([Reduction(10.0, 20.0), Reduction(50.0, 20.0)], backward=50.0)
        20.0
        >>> exposed_time([Reduction(10.0, 20.0, stolen=5.0), Reduction(50.0, 20.0, decoding=1.0)], backward=50.0)
        26.0
    """
    late, free = 0.0, 0.0
    arrived = []
    for one in reductions:
        late += one.encoding
        # The last bucket has nothing after it that it could hold up: the rank waits for it.
        free = max(free, one.ready + late) + one.on_link
        arrived.append(free + one.beside)
        late += one.stolen if one.ready < backward else 0.0
    now = backward + late
    for one, at in zip(reductions, arrived, strict=True):
        now = max(now, at) + one.decoding
    return now - backward
