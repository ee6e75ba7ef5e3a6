"""What operations cost on the wire, by the algorithms that engines use as a rule: a pure function of sizes."""

from __future__ import annotations

__all__ = ["sent_bytes"]


def sent_bytes(operation: str, payload_bytes: float, num_ranks: int) -> float:
    """Bytes that one rank sends.

    Rings, in which a rank sends as much as it receives: all_reduce is a reduce_scatter and an all_gather, each of which
    sends all but one of `num_ranks` parts of the whole once. A broadcast is passed on by all but the last rank, and
    counts as the mean over ranks. A message is counted by who sends it. (Shared memory sends nothing at all; on several
    hosts a hierarchy sends less: this is what a flat network of ranks would carry.)

    Args:
        operation: a transport's, as in `Statistics.payload_bytes`.
        payload_bytes: of the tensor handed in: the whole one of all_gather and reduce_scatter.
        num_ranks: in the group.

    Raises:
        ValueError: no such operation.

    Example:
        >>> sent_bytes("all_reduce", 1000, 4), sent_bytes("all_gather", 1000, 4), sent_bytes("all_reduce", 1000, 1)
        (1500.0, 750.0, 0.0)
    """
    others = (num_ranks - 1) / num_ranks
    factors = {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "reduce_spans": others,
        "all_gather": others,
        "broadcast": others,
        "send": 1.0,
        "recv": 0.0,
        "barrier": 0.0,
    }
    if operation not in factors:
        raise ValueError(f"expected one of {', '.join(factors)}; got {operation!r}")
    return factors[operation] * payload_bytes
