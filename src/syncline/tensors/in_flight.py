"""A loop that sends pieces of tensors one after the other, with a bound on the memory for packed copies.

To send all pieces at once, use `CombinedWork` instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from syncline.transport.work import Work

_MAX_COPIES = 2
"""The maximum number of packed copies at a time. While one is sent, the next is packed. More copies gain nothing."""


class Piece(Protocol):
    """The tensors of one collective. They are sent from their own memory or as a packed copy."""

    @property
    def is_copied(self) -> bool:
        """Whether a packed copy is sent. The copy exists from the start of the collective until its end."""


AnyPiece = TypeVar("AnyPiece", bound=Piece)


def run_pieces(
    pieces: Iterable[AnyPiece], launch: Callable[[AnyPiece], Work], land: Callable[[AnyPiece], object]
) -> None:
    """Send pieces and wait for all of them, with at most two packed copies at a time.

    Args:
        pieces: the pieces, in the same order on all ranks.
        launch: a function that packs a piece, starts its collective, and returns the work to wait for.
        land: a function that writes the result of a piece into its tensors, and frees the copy.
    """
    in_flight: deque[tuple[Work, AnyPiece]] = deque()
    num_copies = 0

    def wait_for_oldest() -> AnyPiece:
        work, piece = in_flight.popleft()
        work.wait()
        land(piece)
        return piece

    for piece in pieces:
        while piece.is_copied and num_copies == _MAX_COPIES:
            num_copies -= wait_for_oldest().is_copied
        in_flight.append((launch(piece), piece))
        num_copies += piece.is_copied
    while in_flight:
        wait_for_oldest()
