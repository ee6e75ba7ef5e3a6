"""Division of summed gradients by the number of items on all ranks (`normalize_by`), and a count of these items.

An item is a token or a sample. If the loss is the *sum* over items, its gradients can be added over ranks and
micro-batches. One division by the number of items on all ranks is then exact, even if batches have unequal sizes. A
mean of the ranks' means is not exact (see huggingface/transformers issue 34242).

Three counts are kept:

- the items of the open `normalize_by` block;
- this rank's items whose gradients have not been reduced yet;
- the items of all ranks whose gradients were reduced and are still in `.grad`. `.grad` holds their mean
  (`reduced_total`). Before more gradients are added, the mean is turned into this rank's part of the sum
  (`carried_total`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_mul_, stored_values, version_of
from syncline.checks import checked_count
from syncline.errors import SynclineError
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Rider, Words
from syncline.words import describe_ranks, format_count

MAX_ITEMS: int = 2**48 - 1
"""The largest number of items that one rank can report for one synchronized backward (about 2.8e14)."""


def checked_num_items(num_items: Any) -> int:
    """Return `num_items` as an int. It may be an integer of any type, or a tensor with one integer.

    Raises:
        TypeError: `num_items` is not an integer.
        ValueError: `num_items` is negative, or too large to be sent exactly.
    """
    is_tensor = isinstance(num_items, Tensor) and num_items.numel() == 1
    count = num_items.item() if is_tensor else num_items
    return checked_count("num_items", count, at_least=0, at_most=MAX_ITEMS)


@dataclass(slots=True)
class ItemCount:
    """Counts of the items whose gradients are in `.grad`: this rank's unreduced items, and all ranks' reduced items."""

    unreduced: int | None = None
    """The number of this rank's items whose gradients are not reduced yet. It is None if no items were counted."""
    num_uncounted_backwards: int = 0
    """The number of backwards outside of `normalize_by` since the last reduction."""
    carried_total: int | None = None
    """The number of items of all ranks in the sum, if `.grad` holds this rank's part of a sum. Otherwise it is None."""
    reduced_total: int | None = None
    """The number of items of all ranks in the mean, if `.grad` holds a mean. Otherwise it is None."""
    open_was_used: bool = False
    """Whether a backward ran inside the open `normalize_by` block."""
    _open: int | None = None
    """The number of items of the open `normalize_by` block. It is None if no block is open."""

    @property
    def anything_behind_gradients(self) -> bool:
        """Whether counted or uncounted backwards may have left gradients in `.grad`."""
        totals = (self.unreduced, self.carried_total, self.reduced_total)
        return totals != (None, None, None) or self.num_uncounted_backwards > 0

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def open(self, num_items: int) -> None:
        if self._open is not None:
            raise ValueError(
                "a normalize_by block was entered inside of another normalize_by block: leave the first block before "
                "you enter the second"
            )
        self._open = num_items
        self.open_was_used = False

    def close(self) -> None:
        self._open = None
        self.open_was_used = False

    def backward_begins(self) -> None:
        """Count a backward. The first backward in a block counts the items of the block."""
        if self._open is None:
            self.num_uncounted_backwards += 1
        elif not self.open_was_used:
            self.open_was_used = True
            self.unreduced = (self.unreduced or 0) + self._open

    def take_for_reduction(self) -> int | None:
        """Return the number of unreduced items, and reset the counts. Return None if no items were counted.

        Raises:
            ValueError: some backwards ran inside of `normalize_by` and others outside. Their gradients are already
                added up, and no divisor is right for the sum.
        """
        counted, uncounted = self.unreduced, self.num_uncounted_backwards
        self.unreduced, self.num_uncounted_backwards = None, 0
        if counted is not None and uncounted:
            raise ValueError(
                "expected all backwards of a synchronized step to run inside of normalize_by, or none, but "
                f"{format_count(uncounted, 'backward')} ran outside and others ran inside. Their gradients are added "
                "up, so no divisor is right for the sum: put every micro-batch of the step inside of normalize_by, or "
                "none"
            )
        return counted

    def reduced(self, num_items: int) -> int:
        """Record a reduction, and return the number of items by which its sum must be divided.

        If gradients were carried, the sum contains them, so the result includes their items.

        Args:
            num_items: the number of items that all ranks reported for the reduction.
        """
        self.reduced_total = num_items + (self.carried_total or 0)
        self.carried_total = None
        return self.reduced_total

    def carry(self, num_ranks: int) -> float:
        """Mark the mean as carried. Return the factor that turns the mean into each rank's part of the sum."""
        assert self.reduced_total is not None
        self.carried_total, self.reduced_total = self.reduced_total, None
        return self.carried_total / num_ranks

    def uncarry(self, num_ranks: int) -> float:
        """Undo `carry`, because no gradients were added. Return the factor that `carry` returned."""
        assert self.carried_total is not None
        total = self.carried_total
        self.carried_total, self.reduced_total = None, total
        return total / num_ranks

    def forget(self) -> None:
        """Reset all counts after `.grad` was cleared."""
        self.unreduced = None
        self.num_uncounted_backwards = 0
        self.carried_total = None
        self.reduced_total = None


class Standing(NamedTuple):
    """The state of the item counts before a reduction outside of a backward. The ranks exchange it."""

    num_items: int | None
    """The number of this rank's items whose gradients are not reduced yet. It is None if no items were counted."""
    is_uncounted: bool
    """Whether backwards ran outside of `normalize_by` since the last reduction."""
    total: int | None
    """The number of items of all ranks whose reduced gradients are still in `.grad`. It is None without such items."""
    is_mean: bool
    """Whether `.grad` holds a mean of reduced gradients. Otherwise it holds this rank's part of a sum."""
    is_changed: bool
    """Whether the mean in `.grad` was changed (by clipping, for example) after the reduction."""


class ItemNormalizer:
    """The item count for the gradients of some parameters.

    The object detects whether `.grad` was cleared or changed since the last reduction, so that the count stays right.
    """

    def __init__(self) -> None:
        self.count = ItemCount()
        self._parameters: Sequence[Tensor] = ()
        self._num_ranks = 1
        self._versions: list[int | None] = []

    def use(self, parameters: Sequence[Tensor], num_ranks: int) -> None:
        """Count the items of these parameters from now on. A block may be open.

        Args:
            parameters: the parameters whose gradients are counted.
            num_ranks: the number of ranks whose gradients are added up.
        """
        before = {id(p): version for p, version in zip(self._parameters, self._versions, strict=False)}
        if before:
            self._versions = [
                before.get(id(p), None if p.grad is None else version_of(p.grad)) for p in parameters
            ]
        self._parameters, self._num_ranks = parameters, num_ranks

    @contextmanager
    def block(self, num_items: int) -> Iterator[None]:
        """Return the context of `DistributedDataParallel.normalize_by`."""
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
        """Store the version counters of `.grad`, so that a later change of `.grad` can be detected.

        Call this method at the end of a backward inside a block.
        """
        self._versions = self._current_versions()

    def standing(self) -> Standing:
        """Return the state of the item counts. If `.grad` was cleared, reset the counts first.

        Raises:
            ValueError: a block is open, so its gradients may be incomplete.
        """
        count = self.count
        if count.is_open:
            raise ValueError(
                "gradients cannot be synchronized inside of a normalize_by block, where they may be incomplete: leave "
                "the block first"
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
        """Turn a mean in `.grad` into this rank's part of the sum, to which new gradients can be added."""
        if self.count.reduced_total is not None:
            self._scale(self.count.carry(self._num_ranks))

    def was_reduced_outside(self, *, is_known: bool) -> None:
        """Record that all of `.grad` is now a mean.

        Args:
            is_known: whether the mean is exactly the sum divided by the number of items that `total` returned, in this
                reduction or in an earlier one.
        """
        self.count.take_for_reduction()
        if is_known:
            self._versions = self._current_versions()

    def total(self, num_items: Sequence[int], *, step: int) -> int:
        """Return the number of items by which the summed gradients must be divided. It includes the carried items.

        Args:
            num_items: the number of items of each rank.
            step: the present step, for messages.

        Raises:
            ValueError: the number is 0.
        """
        self._num_ranks = len(num_items)  # one if gradients stay local
        total = self.count.reduced(sum(num_items))
        if not total:
            raise ValueError(
                f"step {step}: expected normalize_by with at least 1 item on some rank, got 0 items on each of "
                f"{format_count(len(num_items), 'rank')}. The mean over 0 items is undefined: skip a step in which no "
                "rank has items"
            )
        return total

    def _carry_reduced_gradients(self) -> bool:
        """Prepare `.grad` so that new gradients can be added to it. Return whether `.grad` was scaled.

        Reduced gradients are a mean, which is the same on every rank. It is turned back into this rank's part of the
        sum. New gradients can be added to this part. The sum over ranks is then divided by the number of all items.
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
                "the gradients of an earlier backward under normalize_by were changed afterwards (clipped, perhaps), "
                "so the gradients of this backward cannot be added to them exactly: call optimizer.zero_grad() before "
                "normalize_by"
            )
        self._scale(self.count.carry(self._num_ranks))
        return True

    def _were_cleared(self, *, unchanged: bool) -> bool:
        """Return whether the gradients were cleared: every `.grad` is None, or all of them were changed to zeros."""
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
    """A report of the number of this rank's items whose gradients are being reduced, under `normalize_by`."""

    subject = "numbers of items"
    num_bits = 49

    def __init__(self) -> None:
        self.of_ranks: tuple[int, ...] = ()
        """The number of items of each rank in the last step. It is 0 for a rank without inputs."""
        self.any_counted = False
        """Whether items were counted in the last step. If so, its gradients are sums over items."""

    def word(self, backward: Backward) -> int:
        """Return the number of this rank's items plus 1. Return 0 if items are not counted."""
        return 0 if backward.num_items is None else backward.num_items + 1

    def receive(self, words: Words) -> None:
        """Store the number of items of each rank.

        Raises:
            SynclineError: some ranks ran under `normalize_by` and others did not.
        """
        counted = [rank for rank, word in words.active.items() if word]
        if counted and len(counted) != len(words.active):
            others = sorted(set(words.active) - set(counted))
            raise SynclineError(
                f"step {words.step}: {describe_ranks(counted)} ran this backward under normalize_by, but "
                f"{describe_ranks(others)} did not, so no divisor is right for the sum of their gradients: clear the "
                "gradients, and use normalize_by on all ranks (with 0 items on a rank without items) or on none"
            )
        self.any_counted = bool(counted)
        self.of_ranks = tuple(word - 1 if word else 0 for word in words.of_rank)

    def forget(self) -> None:
        """Reset the counts at the end of a backward."""
        self.of_ranks, self.any_counted = (), False
