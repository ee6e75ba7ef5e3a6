"""Statistics of operations, bytes and waiting time, and an estimate of the bytes that each operation sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from syncline.records import StragglerRecord
from syncline.words import format_bytes, format_count, format_time, one_line, wrapped


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The number of operations, the bytes and the waiting time of a transport on this rank, since its creation."""

    num_calls: dict[str, int] = field(default_factory=dict)
    """The number of calls of each operation, by name. One `all_gather_bytes` counts as two calls of "all_gather"."""
    payload_bytes: dict[str, int] = field(default_factory=dict)
    """The total size of the tensors that were passed to each operation, by its name.

    The number of bytes that were sent can be different; see `sent_bytes`.
    """
    waited_seconds: float = 0.0
    """The total time that this rank spent in `Work.wait`, except in the thread that writes checkpoints."""
    stragglers: tuple[StragglerRecord, ...] = ()
    """The ranks that were slow over many steps, the oldest first (the last 100). Only `ddp.statistics()` has them."""

    def __repr__(self) -> str:
        calls, size = format_count(self.total_calls, "call"), format_bytes(self.total_bytes)
        return one_line(self, f"{calls}, {size}, waited {format_time(self.waited_seconds)}")

    def __str__(self) -> str:
        calls, size = format_count(self.total_calls, "call"), format_bytes(self.total_bytes)
        lines = [f"{calls}, {size}, waited {format_time(self.waited_seconds)}"]
        for operation, number in self.num_calls.items():
            num_bytes = format_bytes(self.payload_bytes.get(operation, 0))
            lines.append(f"  {operation}: {format_count(number, 'call')}, {num_bytes}")
        for straggler in self.stragglers:
            lines += wrapped(f"  {straggler}")
        return "\n".join(lines)

    @property
    def total_calls(self) -> int:
        return sum(self.num_calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values())

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the number of bytes that this rank would have sent if every operation had used a ring algorithm.

        For the formula, see the function `sent_bytes`.
        """
        sizes = self.payload_bytes.items()
        return sum(sent_bytes(operation, num_bytes, num_ranks) for operation, num_bytes in sizes)

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Subtract the statistics `earlier` from these statistics of the same transport, and return the difference."""
        return Statistics(
            num_calls=dict(Counter(self.num_calls) - Counter(earlier.num_calls)),
            payload_bytes=dict(Counter(self.payload_bytes) - Counter(earlier.payload_bytes)),
            waited_seconds=self.waited_seconds - earlier.waited_seconds,
            stragglers=tuple(one for one in self.stragglers if one not in earlier.stragglers),
        )


@dataclass(slots=True)
class Counts:
    """The counters of a transport and its lanes. A `Statistics` is a copy of them."""

    num_calls: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    waited_seconds: float = 0.0

    def in_background(self) -> Counts:
        """Return counters for a lane on which another thread waits: with the same calls and bytes, but without waits.

        While that thread waits, this rank works.
        """
        return Counts(self.num_calls, self.payload_bytes)


def sent_bytes(operation: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the number of bytes that one rank sends in an operation with a ring algorithm.

    Each rank of the ring sends only to the next rank. In a reduce_scatter or an all_gather, the whole consists of
    `num_ranks` parts, and each rank sends all parts but one. An all_reduce is a reduce_scatter and an all_gather. In a
    broadcast, every rank except the last one sends the whole, and this function returns the mean over all ranks. A
    message counts only on the rank that sends it. The real number can be smaller: shared memory sends nothing, and a
    hierarchy of several hosts sends less.

    Args:
        operation: the name of the operation, as in `Statistics.payload_bytes`.
        payload_bytes: size of the tensor that was passed in. For all_gather and reduce_scatter, pass the size of the
            whole.
        num_ranks: number of ranks in the group.

    Raises:
        ValueError: the name of the operation is unknown.

    Examples:
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
        raise ValueError(f"expected operation to be one of {', '.join(factors)}; got {operation!r}")
    return factors[operation] * payload_bytes
