"""`normalize_by`: divide summed gradients by the global number of items behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_mul_, stored_values, version_of
from syncline.sync.items import ItemCount

__all__ = ["ItemNormalizer", "Standing"]


class Standing(NamedTuple):
    """What stands behind `.grad`, for a reduction outside of a backward."""

    num_items: int | None
    """Items behind what was not reduced yet; None where nothing was counted."""
    is_uncounted: bool
    """Whether backwards outside of `normalize_by` are not reduced yet."""
    total: int | None
    """Global items behind what was reduced and is still there."""
    is_mean: bool
    """Whether that is there as a mean, not as this rank's share of the sum."""
    is_changed: bool
    """Whether a mean was changed since."""


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

    def follow(self, parameters: Sequence[Tensor], num_ranks: int) -> None:
        """Go on with others, for the module or its group has changed; also inside of a block."""
        before = {id(p): version for p, version in zip(self._parameters, self._versions, strict=False)}
        if before:
            self._versions = [
                before.get(id(p), None if p.grad is None else version_of(p.grad)) for p in parameters
            ]
        self._parameters, self._num_ranks = parameters, num_ranks

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

    def standing(self) -> Standing:
        """What stands behind `.grad` now; nothing, where it was cleared.

        Raises:
            ValueError: a block is open, so nobody knows whether its items are complete.
        """
        count = self.count
        if count.is_open:
            raise ValueError(
                "gradients cannot be synchronized inside of a normalize_by block: leave it first"
            )
        unchanged = self._versions == self._current_versions()
        if count.anything_behind_gradients and self._were_cleared(unchanged=unchanged):
            count.forget()
        return Standing(
            num_items=count.unreduced,
            is_uncounted=count.num_uncounted_backwards > 0,
            total=count.reduced_total if count.carried_total is None else count.carried_total,
            is_mean=count.reduced_total is not None,
            is_changed=count.reduced_total is not None and not unchanged,
        )

    def carry(self) -> None:
        """Turn a mean that is in `.grad` into this rank's share of the sum, to be summed with what is added."""
        if self.count.reduced_total is not None:
            self._scale(self.count.carry(self._num_ranks))

    def was_reduced_outside(self, *, is_known: bool) -> None:
        """All of `.grad` is a mean now; `is_known`: of the items that `total` returned, this time or before."""
        self.count.take_for_reduction()
        if is_known:
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
        unchanged = self._versions == self._current_versions()
        if self._were_cleared(unchanged=unchanged):
            self.count.forget()
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

    def _were_cleared(self, *, unchanged: bool) -> bool:
        """Whether somebody has cleared the gradients."""
        present = [p.grad for p in self._parameters if p.grad is not None]
        return not present or (not unchanged and not any(bool(_values(g).any()) for g in present))

    def _current_versions(self) -> list[int | None]:
        return [None if p.grad is None else version_of(p.grad) for p in self._parameters]

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)


def _values(gradient: Tensor) -> Tensor:
    return stored_values(gradient) if gradient.is_sparse else gradient
