"""Which part of a replica is looked at in which step, so that all of it has had its turn after so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Piece", "rotation", "spread"]

_OVERHEAD_BYTES = 1 << 14
"""What looking at one more tensor costs, however small it is: about as much as so many of its bytes."""
_LEAST_BYTES = 1 << 18
"""A slice of less is not worth the look: then there are fewer of them."""
_ALIGNMENT_NUMEL = 64
"""Tensors are cut at multiples of this, so that each piece but the last is made of whole words."""


class Piece(NamedTuple):
    """Some elements of one tensor, in the order in which they lie in memory."""

    leaf: int
    """Which tensor."""
    start: int
    stop: int


def rotation(sizes: Sequence[tuple[int, int]], num_slices: int) -> list[tuple[Piece, ...]]:
    """Deal tensors out to slices of about the same cost, in order; large ones are cut.

    Args:
        sizes: (numel, itemsize) of each tensor. One without elements is a piece all the same.
        num_slices: how many; some may be empty.

    Example:
        >>> [[tuple(piece) for piece in pieces] for pieces in rotation([(10_000, 4), (3, 8)], 2)]
        [[(0, 0, 5056)], [(0, 5056, 10000), (1, 0, 3)]]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    budget_bytes = max(1, -(-total_bytes // num_slices))
    slices: list[list[Piece]] = [[] for _ in range(num_slices)]
    at = 0
    for leaf, (numel, itemsize) in enumerate(sizes):
        index = min(at // budget_bytes, num_slices - 1)
        begins = at + _OVERHEAD_BYTES
        start = 0
        while start < numel or not numel:
            left_bytes = (index + 1) * budget_bytes - begins
            stop = numel
            if index < num_slices - 1 and left_bytes < numel * itemsize:
                stop = max(start, -(-left_bytes // (itemsize * _ALIGNMENT_NUMEL)) * _ALIGNMENT_NUMEL)
                stop = min(stop, numel)
            if stop > start or not numel:
                slices[index].append(Piece(leaf, start, stop))
                start = stop
            index += 1
            if not numel:
                break
        at = begins + numel * itemsize
    return [tuple(pieces) for pieces in slices]


def spread(sizes: Sequence[tuple[int, int]], num_turns: int) -> list[tuple[Piece, ...]]:
    """The same for a number of turns; where there is little, some turns, evenly spread, have nothing.

    Example:
        >>> [len(pieces) for pieces in spread([(50_000, 4), (50_000, 4)], 5)]
        [1, 0, 1, 0, 0]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    num_slices = max(1, min(num_turns, -(-total_bytes // _LEAST_BYTES)))
    turns: list[tuple[Piece, ...]] = [()] * num_turns
    for index, pieces in enumerate(rotation(sizes, num_slices)):
        turns[index * num_turns // num_slices] = pieces
    return turns
