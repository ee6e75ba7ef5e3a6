"""`normalize_by`: summed gradients divided by the global number of items behind them, and the bookkeeping for it.

A loss that is the *sum* over items (tokens, samples) gives gradients that can be added over ranks and micro-batches.
One division by the global number of items is then exact, even if batches have unequal sizes
(huggingface/transformers issue 34242 shows the error of averaging means of means).

Three numbers are kept:

- the items of the open `normalize_by` block;
- the items of micro-batches that have not been reduced yet;
- the global total behind gradients that were reduced and are still in `.grad`. They are there as a mean
  (`reduced_total`) or, once more gradients are to be added to them, as this rank's part of the sum ("carried").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_mul_, stored_values, version_of
from syncline.checks import checked_count
from syncline.errors import SynclineError
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.words import describe_ranks

MAX_ITEMS: int = 2**48 - 1
"""The largest item count that one rank may report for one synchronized backward (about 2.8e14)."""


def checked_num_items(num_items: Any) -> int:
    """Return `num_items` as an int; integers of any kind (0-d tensors too) are accepted.

    Raises:
        TypeError: `num_items` is not an integer.
        ValueError: `num_items` is negative, or too large to be sent exactly.
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
        """Whether this bookkeeping knows of earlier backwards that may have left gradients in `.grad`."""
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
        """Items behind gradients that were not reduced yet; None if no items were counted."""
        return self._unreduced

    @property
    def num_uncounted_backwards(self) -> int:
        """Number of backwards outside of `normalize_by` since the last reduction."""
        return self._num_uncounted_backwards

    @property
    def carried_total(self) -> int | None:
        """Global items behind a mean that was turned into this rank's part of the sum; None if there is none."""
        return self._carried_total

    def take_for_reduction(self) -> int | None:
        """Return the items to report with a synchronized backward; None if no items were counted.

        Raises:
            ValueError: some micro-batches were counted and others were not. Their gradients are already added up, and
                no divisor is right for both.
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
        """Record a reduction of `num_items` (over all ranks); return the items behind its result, carried ones too."""
        self.reduced_total = num_items + (self._carried_total or 0)
        self._carried_total = None
        return self.reduced_total

    def carry(self, num_ranks: int) -> float:
        """Mark the reduced mean as carried; return the factor that turns it into each rank's part of the sum."""
        assert self.reduced_total is not None
        self._carried_total, self.reduced_total = self.reduced_total, None
        return self._carried_total / num_ranks

    def uncarry(self, num_ranks: int) -> float:
        """Undo `carry`, because nothing was added; return the factor that `carry` returned."""
        assert self._carried_total is not None
        total = self._carried_total
        self._carried_total, self.reduced_total = None, total
        return total / num_ranks

    def forget(self) -> None:
        """Reset all counts after `.grad` was cleared."""
        self._unreduced = None
        self._num_uncounted_backwards = 0
        self._carried_total = None
        self.reduced_total = None


class Standing(NamedTuple):
    """The numbers of items whose gradients are in `.grad`, for a reduction outside of a backward."""

    num_items: int | None
    """Items behind gradients that were not reduced yet; None if no items were counted."""
    is_uncounted: bool
    """Whether there were backwards outside of `normalize_by` that are not reduced yet."""
    total: int | None
    """Global items behind reduced gradients that are still in `.grad`; None if there are none."""
    is_mean: bool
    """Whether those reduced gradients are a mean, not this rank's part of the sum."""
    is_changed: bool
    """Whether that mean was changed after the reduction."""


class ItemNormalizer:
    """The item count and its link to `.grad`: it stays right when gradients are added to, cleared or changed.

    Args:
        parameters: the parameters whose gradients are counted.
        num_ranks: the number of ranks whose gradients are added up.
    """

    def __init__(self, parameters: Sequence[Tensor], num_ranks: int) -> None:
        self.count = ItemCount()
        self._parameters = parameters
        self._num_ranks = num_ranks
        self._versions: list[int | None] = []

    def follow(self, parameters: Sequence[Tensor], num_ranks: int) -> None:
        """Use other parameters from now on, because the module or its group has changed; also inside of a block."""
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
        """Inside a block, remember the version counters of `.grad`, to detect changes before the next block."""
        if self.count.is_open:
            self._versions = self._current_versions()

    def standing(self) -> Standing:
        """Return the counts behind the present `.grad`; they are empty if it was cleared.

        Raises:
            ValueError: a block is open, so its gradients may be incomplete.
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
        """Turn a mean in `.grad` into this rank's part of the sum, so that it can be summed with new gradients."""
        if self.count.reduced_total is not None:
            self._scale(self.count.carry(self._num_ranks))

    def was_reduced_outside(self, *, is_known: bool) -> None:
        """Record that all of `.grad` is now a mean.

        Args:
            is_known: whether it is the mean over the items that `total` returned, in this reduction or an earlier one.
        """
        self.count.take_for_reduction()
        if is_known:
            self._versions = self._current_versions()

    def total(self, num_items: Sequence[int], *, step: int) -> int:
        """Return the divisor: the sum of all ranks' items and of the items behind carried gradients.

        Raises:
            ValueError: the sum is 0.
        """
        self._num_ranks = len(num_items)  # one if gradients stay local
        total = self.count.reduced(sum(num_items))
        if not total:
            raise ValueError(
                f"step {step}: normalize_by counted 0 items on all {len(num_items)} rank(s), so the mean is "
                "undefined: skip the step where no rank has items"
            )
        return total

    def _carry_reduced_gradients(self) -> bool:
        """Prepare `.grad` so that gradients can be added to it; return whether it was scaled.

        Reduced gradients are already a mean, the same on every rank. They are turned back into this rank's part of the
        sum. Then they can be summed again together with the new gradients, and divided by the items of both.
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
        """Return whether the gradients were cleared: none is left, or all were changed to zeros."""
        present = [p.grad for p in self._parameters if p.grad is not None]
        return not present or (not unchanged and not any(bool(_values(g).any()) for g in present))

    def _current_versions(self) -> list[int | None]:
        return [None if p.grad is None else version_of(p.grad) for p in self._parameters]

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)


def _values(gradient: Tensor) -> Tensor:
    return stored_values(gradient) if gradient.is_sparse else gradient


class Items(Rider):
    """Report of the items behind this rank's gradients, under `normalize_by`."""

    num_bits = 49

    def __init__(self) -> None:
        self.of_ranks: tuple[int, ...] = ()
        """The items of all ranks in the step that was reported last; 0 for a rank without inputs."""
        self.any_counted = False
        """Whether the gradients of that step are sums over items."""

    def word(self, backward: Backward) -> int:
        """Return the number of items plus 1; 0 if they are not counted."""
        return 0 if backward.num_items is None else backward.num_items + 1

    def receive(self, words: Words) -> None:
        """Store the counts of all ranks.

        Raises:
            SynclineError: some ranks ran under `normalize_by` and others did not.
        """
        counted = [rank for rank, word in words.active.items() if word]
        if counted and len(counted) != len(words.active):
            others = sorted(set(words.active) - set(counted))
            raise SynclineError(
                f"step {words.step}: {describe_ranks(counted)} ran this backward under normalize_by, "
                f"{describe_ranks(others)} did not: the gradients have no common divisor. Use normalize_by on all "
                "ranks (0 items is fine) or on none, then zero the gradients"
            )
        self.any_counted = bool(counted)
        self.of_ranks = tuple(word - 1 if word else 0 for word in words.of_rank)

    def forget(self) -> None:
        """Reset the counts at the end of a backward."""
        self.of_ranks, self.any_counted = (), False
