"""Counts of operations, bytes and waiting time, and the number of bytes that each operation usually sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts of a transport's operations, bytes and waiting time on this rank, since the transport was created."""

    num_calls: dict[str, int] = field(default_factory=dict)
    """The number of operations started, by name. `all_gather_bytes` counts as two `all_gather`."""
    payload_bytes: dict[str, int] = field(default_factory=dict)
    """The bytes of the tensors passed in, by operation. (The number of bytes sent may differ, see `sent_bytes`.)"""
    waited_seconds: float = 0.0
    """The time spent blocked in `Work.wait`."""

    @property
    def total_calls(self) -> int:
        return sum(self.num_calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values())

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that this rank has sent if ring algorithms were used; see the function `sent_bytes`."""
        sizes = self.payload_bytes.items()
        return sum(sent_bytes(operation, num_bytes, num_ranks) for operation, num_bytes in sizes)

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return the statistics of the time between the snapshot `earlier` and this one."""
        return Statistics(
            num_calls=dict(Counter(self.num_calls) - Counter(earlier.num_calls)),
            payload_bytes=dict(Counter(self.payload_bytes) - Counter(earlier.payload_bytes)),
            waited_seconds=self.waited_seconds - earlier.waited_seconds,
        )


@dataclass(slots=True)
class Counts:
    """The counters from which `Statistics` are copied. All lanes of one transport use the same object."""

    num_calls: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    waited_seconds: float = 0.0


def sent_bytes(operation: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that one rank sends in an operation, if the ranks are a ring.

    In a ring, a rank sends as much as it receives. An all_reduce consists of a reduce_scatter and an all_gather. Each
    of the two sends all but one of the `num_ranks` parts of the whole once. In a broadcast, all ranks but the last one
    pass the data on, and the result is the mean over ranks. A message counts on its sender only. Real traffic may be
    smaller: shared memory sends nothing, and a hierarchy of several hosts sends less.

    Args:
        operation: an operation of a transport, as in `Statistics.payload_bytes`.
        payload_bytes: size of the tensor passed in. For all_gather and reduce_scatter, it is the size of the whole.
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
        raise ValueError(f"expected the operation to be one of {', '.join(factors)}; got {operation!r}")
    return factors[operation] * payload_bytes
