"""Decide which tensors are sent alone and which are packed into chunks: a pure function of their sizes.

A large tensor is sent from its own memory. Small tensors are copied together, because a call costs more than the copy
of a small tensor. The plan depends on sizes and devices only, so that all ranks plan the same collectives even if the
strides of their tensors differ.
"""

from __future__ import annotations

from collections.abc import Sequence

CAP_BYTES = 32 * 1024 * 1024
"""Size of the largest chunk of packed tensors."""

ALONE_BYTES = 1024 * 1024
"""Least size of a tensor that is sent alone."""


def plan_pieces(
    sizes_bytes: Sequence[int],
    places: Sequence[object] | None = None,
    *,
    cap_bytes: int = CAP_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> list[tuple[int, ...]]:
    """Group tensors into pieces; each piece is one collective.

    Args:
        sizes_bytes: the size of each tensor. Empty tensors are in no piece, because there is nothing to send.
        places: the place (device) of each tensor; the tensors of a piece are in the same place. None if all tensors are
            in the same place.
        cap_bytes: the maximum size of a piece of several tensors.
        alone_bytes: the least size of a tensor that is a piece of its own.

    Returns:
        The indices of the tensors of each piece, in the order of their first tensors.

    Example:
        >>> plan_pieces([100, 5_000_000, 0, 200, 300], cap_bytes=400)
        [(0, 3), (1,), (4,)]
    """
    if cap_bytes < 1 or alone_bytes < 1:
        raise ValueError(
            f"expected cap_bytes and alone_bytes above 0, got cap_bytes={cap_bytes}, alone_bytes={alone_bytes}"
        )
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
