"""How many items stand behind the gradients in `.grad`: the bookkeeping of `normalize_by`.

A loss that is the *sum* over items (tokens, samples) gives gradients that may simply be added over ranks and
micro-batches; dividing once by the global number of items then is exact, however unequal the batches are
(huggingface/transformers issue 34242 shows what averaging means of means does instead).

Kept are the items of the `normalize_by` block that is open, those of micro-batches that have not been reduced yet,
and the global total behind gradients that were reduced and are still in `.grad`: as a mean (`reduced_total`) or,
once more is to be added to them, as this rank's share of the sum (carried).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from syncline.given import checked_count
from syncline.sync.control import MAX_ITEMS

__all__ = ["ItemCount", "checked_num_items"]


def checked_num_items(num_items: Any) -> int:
    """`num_items` as an int; integers of any kind (0-d tensors too) are accepted.

    Raises:
        TypeError: not an integer.
        ValueError: negative, or too large to be sent exactly.
    """
    is_tensor = isinstance(num_items, Tensor) and num_items.numel() == 1
    count = num_items.item() if is_tensor else num_items
    return checked_count("num_items", count, at_least=0, at_most=MAX_ITEMS)


class ItemCount:
    """The items behind this rank's unreduced gradients, and the global total behind reduced ones."""

    def __init__(self) -> None:
        self._open: int | None = None
        self._open_was_used = False
        self._unreduced: int | None = None
        self._num_uncounted_backwards = 0
        self._carried_total: int | None = None
        self.reduced_total: int | None = None
        """Global items behind the mean that a reduction left in `.grad`."""

    @property
    def anything_behind_gradients(self) -> bool:
        """Whether earlier backwards may have left something in `.grad` that this bookkeeping knows of."""
        totals = (self._unreduced, self._carried_total, self.reduced_total)
        return totals != (None, None, None) or self._num_uncounted_backwards > 0

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def open_was_used(self) -> bool:
        """Whether a backward ran inside the open `normalize_by` block."""
        return self._open_was_used

    def open(self, num_items: int) -> None:
        if self._open is not None:
            raise ValueError(
                "normalize_by blocks do not nest: leave the first one before you enter the second"
            )
        self._open = num_items
        self._open_was_used = False

    def close(self) -> None:
        self._open = None
        self._open_was_used = False

    def backward_begins(self) -> None:
        """Count the open block's items once, at its first backward."""
        if self._open is None:
            self._num_uncounted_backwards += 1
        elif not self._open_was_used:
            self._open_was_used = True
            self._unreduced = (self._unreduced or 0) + self._open

    @property
    def unreduced(self) -> int | None:
        """Items behind what was not reduced yet; None where nothing was counted."""
        return self._unreduced

    @property
    def num_uncounted_backwards(self) -> int:
        """Backwards outside of `normalize_by` since the last reduction."""
        return self._num_uncounted_backwards

    @property
    def carried_total(self) -> int | None:
        """Global items behind a mean that was turned into this rank's share of the sum."""
        return self._carried_total

    def take_for_reduction(self) -> int | None:
        """The items to report with a synchronized backward, or None where nothing was counted.

        Raises:
            ValueError: some micro-batches were counted and others not: their gradients are already added up
                and no divisor is right for both.
        """
        counted, uncounted = self._unreduced, self._num_uncounted_backwards
        self._unreduced, self._num_uncounted_backwards = None, 0
        if counted is not None and uncounted:
            raise ValueError(
                f"{uncounted} backward(s) outside of normalize_by were accumulated with gradients counted by "
                "normalize_by: put every micro-batch of one synchronized step inside normalize_by, or none"
            )
        return counted

    def reduced(self, num_items: int) -> int:
        """A reduction of `num_items` (over all ranks) is done; returns the items behind it, carried ones too."""
        self.reduced_total = num_items + (self._carried_total or 0)
        self._carried_total = None
        return self.reduced_total

    def carry(self, num_ranks: int) -> float:
        """The factor that turns the reduced mean into each rank's share of the sum it came from."""
        assert self.reduced_total is not None
        self._carried_total, self.reduced_total = self.reduced_total, None
        return self._carried_total / num_ranks

    def uncarry(self, num_ranks: int) -> float:
        """Take `carry` back, nothing was added; returns the factor that `carry` returned."""
        assert self._carried_total is not None
        total = self._carried_total
        self._carried_total, self.reduced_total = None, total
        return total / num_ranks

    def forget(self) -> None:
        """`.grad` was cleared: nothing stands behind it any more."""
        self._unreduced = None
        self._num_uncounted_backwards = 0
        self._carried_total = None
        self.reduced_total = None
