"""The plan of the collectives for many tensors: which tensors are sent alone, and which are packed into one piece.

A large tensor is sent from its own memory. Small tensors are copied into one piece of memory, because a collective
costs more than the copy of a small tensor. The plan depends only on the sizes and devices of the tensors. So all ranks
plan the same collectives, even if the strides of their tensors differ.
"""

from __future__ import annotations

from collections.abc import Sequence

CAP_BYTES = 32 * 1024 * 1024
"""The maximum size of a piece of several packed tensors."""

ALONE_BYTES = 1024 * 1024
"""The least size of a tensor that is sent alone."""


def plan_pieces(
    sizes_bytes: Sequence[int],
    places: Sequence[object] | None = None,
    *,
    cap_bytes: int = CAP_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> list[tuple[int, ...]]:
    """Group tensors into pieces. Each piece is sent by one collective.

    Args:
        sizes_bytes: the size of each tensor. Empty tensors are in no piece, because there is nothing to send.
        places: the place (such as the device) of each tensor. A piece contains only tensors of one place. Pass None if
            all tensors are in the same place.
        cap_bytes: the maximum size of a piece of several tensors.
        alone_bytes: a tensor of at least this size is always a piece by itself.

    Returns:
        The indices of the tensors of each piece. The pieces are in the order of their first tensors.

    Examples:
        >>> plan_pieces([100, 5_000_000, 0, 200, 300], cap_bytes=400)
        [(0, 3), (1,), (4,)]
    """
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
