"""The bytes that operations send with the algorithms that engines usually use: a pure function of sizes."""

from __future__ import annotations

__all__ = ["sent_bytes"]


def sent_bytes(operation: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that one rank sends.

    The formulas assume rings, in which a rank sends as much as it receives. An all_reduce is a reduce_scatter and an
    all_gather, each of which sends all but one of `num_ranks` parts of the whole once. In a broadcast, all but the last
    rank pass the data on; the result is the mean over ranks. A message counts on its sender. The result is the traffic
    of a flat network of ranks: shared memory sends nothing, and a hierarchy of several hosts sends less.

    Args:
        operation: an operation of a transport, as in `Statistics.payload_bytes`.
        payload_bytes: size of the tensor passed in; for all_gather and reduce_scatter, of the whole tensor.
        num_ranks: number of ranks in the group.

    Raises:
        ValueError: the operation is unknown.

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
