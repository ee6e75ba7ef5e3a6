"""A gather of bytes of unequal lengths from all ranks, in few collectives and with a bound on the memory for copies.

The bytes of each rank form a row. The rows are gathered in rounds. In each round, every rank sends the next bytes of
its row, padded to the longest of these parts, in one all_gather. If most of a large round would be padding, each rank
that has bytes left broadcasts them instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.tensors.in_flight import run_pieces
from syncline.transport.base import Transport
from syncline.transport.work import Work

ROUND_BYTES = 16 * 1024 * 1024
"""The maximum size of a round, over all ranks. It is exceeded if there are so many ranks that each would send less than
`SMALL_BYTES`."""

SMALL_BYTES = 64 * 1024
"""The maximum size of a rank's part that is always sent by all_gather. A second collective would cost more than the
padding."""


class Round(NamedTuple):
    """One collective: the part of the rows that it sends."""

    start: int
    """The position in the rows at which the part begins, in bytes."""
    sizes: tuple[int, ...]
    """The number of bytes of each rank."""
    src: int | None
    """The rank that broadcasts its part. None means an all_gather of the parts of all ranks."""

    @property
    def is_copied(self) -> bool:
        """Whether a packed copy is sent, which is always the case; see `Piece`."""
        return True


def plan_rounds(
    lengths_bytes: Sequence[int], *, round_bytes: int = ROUND_BYTES, small_bytes: int = SMALL_BYTES
) -> list[Round]:
    """Return the rounds in which rows of these lengths are gathered. The plan is the same on every rank.

    Args:
        lengths_bytes: the length of each rank's row.
        round_bytes: see `ROUND_BYTES`.
        small_bytes: see `SMALL_BYTES`.

    Examples:
        >>> plan_rounds([3, 0])
        [Round(start=0, sizes=(3, 0), src=None)]
        >>> plan_rounds([40, 0], round_bytes=64, small_bytes=16)
        [Round(start=0, sizes=(32, 0), src=0), Round(start=32, sizes=(8, 0), src=None)]
    """
    num_ranks = len(lengths_bytes)
    part_bytes = max(small_bytes, round_bytes // num_ranks)
    rounds = []
    for start in range(0, max(lengths_bytes), part_bytes):
        sizes = tuple(min(max(0, length - start), part_bytes) for length in lengths_bytes)
        if max(sizes) <= small_bytes or 2 * sum(sizes) > num_ranks * max(sizes):
            rounds.append(Round(start, sizes, None))
            continue
        rounds += [Round(start, sizes, rank) for rank, size in enumerate(sizes) if size]
    return rounds


def gather_unequal(transport: Transport, own: Row, rows: Sequence[Row], device: torch.device) -> None:
    """Write the row of every rank into `rows`. A collective call that blocks.

    At most two rounds are in flight. Each needs memory of up to `ROUND_BYTES`, and of the part of one rank.

    Args:
        transport: the transport between the ranks.
        own: the row of this rank. It is only read.
        rows: for each rank, the row to write. Their lengths are the same on all ranks.
        device: a device from which the transport can send.
    """
    if transport.size == 1:
        for target, source in zip(rows[0].parts, own.parts, strict=True):
            target.copy_(source)
        return
    received: dict[Round, Tensor] = {}

    def launch(one: Round) -> Work:
        if one.src is not None:
            size = one.sizes[one.src]
            wire = torch.empty(size, dtype=torch.uint8, device=device)
            if one.src == transport.rank:
                own.read(one.start, wire)
            received[one] = wire
            return transport.broadcast(wire, one.src)
        mine = torch.zeros(max(one.sizes), dtype=torch.uint8, device=device)
        own.read(one.start, mine[: one.sizes[transport.rank]])
        wire = torch.empty(transport.size * mine.numel(), dtype=torch.uint8, device=device)
        received[one] = wire
        return transport.all_gather(wire, mine)

    def land(one: Round) -> None:
        wire = received.pop(one)
        if one.src is not None:
            rows[one.src].write(one.start, wire)
            return
        for row, size, part in zip(rows, one.sizes, wire.view(transport.size, -1), strict=True):
            row.write(one.start, part[:size])

    run_pieces(plan_rounds([row.num_bytes for row in rows]), launch, land)


class Row:
    """A row of bytes that consists of the memory of several tensors.

    Args:
        parts: flat tensors of dtype uint8, on any devices.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self._stops = list(accumulate(part.numel() for part in parts))
        self.num_bytes = self._stops[-1] if parts else 0

    def read(self, start: int, into: Tensor) -> None:
        """Copy the bytes that begin at `start` into a flat tensor, and fill it."""
        for span, part in self._spans(start, into):
            span.copy_(part)

    def write(self, start: int, source: Tensor) -> None:
        """Copy all bytes of a flat tensor into the row, beginning at `start`."""
        for span, part in self._spans(start, source):
            part.copy_(span)

    def _spans(self, start: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of `flat`, each with the view of the same bytes in one part."""
        stop = start + flat.numel()
        for part, part_stop in zip(self.parts, self._stops, strict=True):
            part_start = part_stop - part.numel()
            first, last = max(start, part_start), min(stop, part_stop)
            if first < last:
                yield flat[first - start : last - start], part[first - part_start : last - part_start]
