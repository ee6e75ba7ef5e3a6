"""`normalize_by`: divide summed gradients by the global number of items behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from syncline.sync.items import ItemCount

__all__ = ["ItemNormalizer"]


class ItemNormalizer:
    """Keeps the item count true to what is in `.grad`, also when gradients are added to, cleared or changed.

    Args:
        parameters: whose gradients are counted.
        num_ranks: how many ranks add theirs.
    """

    def __init__(self, parameters: Sequence[Tensor], num_ranks: int) -> None:
        self.count = ItemCount()
        self._parameters = parameters
        self._num_ranks = num_ranks
        self._versions: list[int | None] = []

    @contextmanager
    def block(self, num_items: int) -> Iterator[None]:
        """See `DistributedDataParallel.normalize_by`."""
        self.count.open(num_items)
        try:
            carried = self._carry_reduced_gradients()
            try:
                yield
            finally:
                if carried and not self.count.open_was_used:
                    self._scale(1.0 / self.count.uncarry(self._num_ranks))
        finally:
            self.count.close()

    def backward_is_done(self) -> None:
        """Inside a block: remember `.grad`'s version counters, to notice what is done to it before the next one."""
        if self.count.is_open:
            self._versions = self._current_versions()

    def total(self, num_items: Sequence[int], *, step: int) -> int:
        """The divisor: the items of all ranks, and those behind gradients that were carried over.

        Raises:
            ValueError: there are none.
        """
        self._num_ranks = len(num_items)  # one, where gradients stay local
        total = self.count.reduced(sum(num_items))
        if not total:
            raise ValueError(
                f"step {step}: normalize_by counted 0 items on all {len(num_items)} rank(s), so the mean is "
                "undefined: skip the step where no rank has items"
            )
        return total

    def _carry_reduced_gradients(self) -> bool:
        """Prepare what earlier backwards left in `.grad` for being added to; whether anything was changed.

        Reduced gradients are a mean already, the same on every rank. Turned back into this rank's share of the
        sum they can be summed again with what is added now, and divided by the items of both.
        """
        if not self.count.anything_behind_gradients:
            return False
        present = [p.grad for p in self._parameters if p.grad is not None]
        unchanged = self._versions == self._current_versions()
        if not present or (not unchanged and not any(bool(g.any()) for g in present)):
            self.count.forget()  # somebody cleared the gradients
            return False
        if self.count.reduced_total is None:
            return False
        if not unchanged:
            raise ValueError(
                "the gradients of an earlier backward under normalize_by were changed since (clipped, perhaps) and "
                "not cleared, so nothing can be added to them exactly: call optimizer.zero_grad() first"
            )
        self._scale(self.count.carry(self._num_ranks))
        return True

    def _current_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
