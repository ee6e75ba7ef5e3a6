"""Counts of operations, bytes and waiting time, and the bytes that operations usually send."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts of a transport's operations, bytes and waiting time on this rank, since the transport was created."""

    num_calls: dict[str, int] = field(default_factory=dict)
    """Number of operations started, by name. `all_gather_bytes` counts as the collectives that it consists of."""
    payload_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors passed in, by operation. (The bytes that an algorithm sends may differ.)"""
    waited_seconds: float = 0.0
    """Time spent blocked in `Work.wait`."""

    @property
    def total_calls(self) -> int:
        return sum(self.num_calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values())

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that this rank has sent if the usual algorithms were used; see the function `sent_bytes`."""
        sizes = self.payload_bytes.items()
        return sum(sent_bytes(operation, num_bytes, num_ranks) for operation, num_bytes in sizes)

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return the statistics of the time between `earlier` and this."""

        def minus(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
            return {name: n for name in now if (n := now[name] - then.get(name, 0))}

        return replace(
            self,
            num_calls=minus(self.num_calls, earlier.num_calls),
            payload_bytes=minus(self.payload_bytes, earlier.payload_bytes),
            waited_seconds=self.waited_seconds - earlier.waited_seconds,
        )


class Counts:
    """The counters behind `Statistics`. All lanes of one transport use the same object."""

    __slots__ = ("num_calls", "payload_bytes", "waited_seconds")

    def __init__(self) -> None:
        self.num_calls: dict[str, int] = {}
        self.payload_bytes: dict[str, int] = {}
        self.waited_seconds = 0.0


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
