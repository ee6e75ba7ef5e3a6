"""Which tensors travel alone and which are packed into chunks: a pure function of their sizes.

A large tensor is sent from where it is, without a copy. Small ones are copied together, because for them a
call costs more than the memory. The plan depends on sizes and devices only, so that all ranks plan the same
collectives whatever the strides of their tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ALONE_BYTES", "CAP_BYTES", "plan_pieces"]


CAP_BYTES = 32 * 1024 * 1024
"""Largest chunk of packed tensors."""

ALONE_BYTES = 1024 * 1024
"""Tensors from this size on travel alone."""


def plan_pieces(
    sizes_bytes: Sequence[int],
    places: Sequence[object] | None = None,
    *,
    cap_bytes: int = CAP_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> list[tuple[int, ...]]:
    """Group tensors into pieces; each piece is one collective.

    Args:
        sizes_bytes: size of each tensor. Empty ones are in no piece: there is nothing to send.
        places: where each tensor is (its device); tensors of one piece are in one place. None: all in one.
        cap_bytes: largest piece of several tensors.
        alone_bytes: tensors from this size on are a piece of their own.

    Returns:
        Indices of the tensors of each piece, in the order of their first tensors.

    Example:
        >>> plan_pieces([100, 5_000_000, 0, 200, 300], cap_bytes=400)
        [(0, 3), (1,), (4,)]
    """
    if cap_bytes < 1 or alone_bytes < 1:
        raise ValueError(f"expected sizes above 0, got cap_bytes={cap_bytes}, alone_bytes={alone_bytes}")
    pieces: list[list[int]] = []
    open_pieces: dict[object, tuple[list[int], int]] = {}
    for index, size in enumerate(sizes_bytes):
        if size == 0:
            continue
        if size >= alone_bytes:
            pieces.append([index])
            continue
        place = None if places is None else places[index]
        piece, filled = open_pieces.get(place, ([], 0))
        if not piece or filled + size > cap_bytes:
            piece, filled = [], 0
            pieces.append(piece)
        piece.append(index)
        open_pieces[place] = (piece, filled + size)
    return [tuple(piece) for piece in pieces]
