"""Division of summed gradients by the global number of items behind them (`normalize_by`), and a count of the items.

A loss that is the *sum* over items (tokens, samples) gives gradients that can be added over ranks and micro-batches.
One division by the global number of items is then exact, even if batches have unequal sizes. A mean of the ranks'
means is not (see huggingface/transformers issue 34242).

Three numbers are kept:

- the items of the open `normalize_by` block;
- the items of micro-batches that have not been reduced yet;
- the global total behind gradients that were reduced and are still in `.grad`. `.grad` holds their mean
  (`reduced_total`) or, once more gradients are to be added, this rank's part of their sum (`carried_total`).
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
"""The largest item count that one rank may report for one synchronized backward (about 2.8e14)."""


def checked_num_items(num_items: Any) -> int:
    """Return `num_items` as an int. Integers of any kind are accepted, also in tensors of one element.

    Raises:
        TypeError: `num_items` is not an integer.
        ValueError: `num_items` is negative, or too large to be sent exactly.
    """
    is_tensor = isinstance(num_items, Tensor) and num_items.numel() == 1
    count = num_items.item() if is_tensor else num_items
    return checked_count("num_items", count, at_least=0, at_most=MAX_ITEMS)


@dataclass(slots=True)
class ItemCount:
    """The items behind this rank's unreduced gradients, and the global total behind reduced gradients."""

    unreduced: int | None = None
    """Items behind gradients that were not reduced yet; None if no items were counted."""
    num_uncounted_backwards: int = 0
    """Number of backwards outside of `normalize_by` since the last reduction."""
    carried_total: int | None = None
    """Global items behind a mean that was turned into this rank's part of the sum; None if there is no such mean."""
    reduced_total: int | None = None
    """Global items behind the mean that a reduction left in `.grad`; None if there is no such mean."""
    open_was_used: bool = False
    """Whether a backward ran inside the open `normalize_by` block."""
    _open: int | None = None
    """The items of the open `normalize_by` block; None if no block is open."""

    @property
    def anything_behind_gradients(self) -> bool:
        """Whether earlier backwards may have left gradients in `.grad`, as far as they were counted here."""
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
        """Count the open block's items once, at its first backward."""
        if self._open is None:
            self.num_uncounted_backwards += 1
        elif not self.open_was_used:
            self.open_was_used = True
            self.unreduced = (self.unreduced or 0) + self._open

    def take_for_reduction(self) -> int | None:
        """Return the items to report with a synchronized backward; None if no items were counted.

        Raises:
            ValueError: some micro-batches were counted and others were not. Their gradients are already added up, and
                no divisor is right for the sum.
        """
        counted, uncounted = self.unreduced, self.num_uncounted_backwards
        self.unreduced, self.num_uncounted_backwards = None, 0
        if counted is not None and uncounted:
            raise ValueError(
                f"the gradients of {format_count(uncounted, 'backward')} outside of normalize_by were added to "
                "gradients of backwards inside of normalize_by, so no divisor is right for the sum: put every "
                "micro-batch of a synchronized step inside of normalize_by, or none"
            )
        return counted

    def reduced(self, num_items: int) -> int:
        """Record a reduction of `num_items` items over all ranks; return the items behind the result.

        The result also contains the gradients whose items were carried.
        """
        self.reduced_total = num_items + (self.carried_total or 0)
        self.carried_total = None
        return self.reduced_total

    def carry(self, num_ranks: int) -> float:
        """Mark the mean as carried; return the factor that turns the mean into each rank's part of the sum."""
        assert self.reduced_total is not None
        self.carried_total, self.reduced_total = self.reduced_total, None
        return self.carried_total / num_ranks

    def uncarry(self, num_ranks: int) -> float:
        """Undo `carry`, because no gradients were added; return the factor that `carry` returned."""
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
    """The numbers of items whose gradients are in `.grad`, for a reduction outside of a backward."""

    num_items: int | None
    """Items behind gradients that were not reduced yet; None if no items were counted."""
    is_uncounted: bool
    """Whether there were backwards outside of `normalize_by` that are not reduced yet."""
    total: int | None
    """Global items behind reduced gradients that are still in `.grad`; None if there are no such gradients."""
    is_mean: bool
    """Whether the reduced gradients in `.grad` are a mean, and not this rank's part of a sum."""
    is_changed: bool
    """Whether the mean in `.grad` was changed after the reduction."""


class ItemNormalizer:
    """The item count of some parameters. It stays right when the gradients in `.grad` are added to, cleared or changed.

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
        """Use other parameters from now on, because the module or its group has changed. A block may be open."""
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
        """Return the counts behind the present `.grad`. The counts are empty if `.grad` was cleared.

        Raises:
            ValueError: a block is open, so its gradients may be incomplete.
        """
        count = self.count
        if count.is_open:
            raise ValueError(
                "gradients cannot be synchronized inside of a normalize_by block: leave the block first"
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
            is_known: whether the mean is over the number of items that `total` returned, in this reduction or before.
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
                f"step {step}: expected normalize_by with at least 1 item on some rank, got 0 items on each of "
                f"{format_count(len(num_items), 'rank')}, so the mean is undefined: skip a step in which no rank has "
                "items"
            )
        return total

    def _carry_reduced_gradients(self) -> bool:
        """Prepare `.grad` so that new gradients can be added; return whether `.grad` was scaled.

        Reduced gradients are a mean, the same on every rank. They are turned back into this rank's part of the sum. So
        they can be summed again together with the new gradients, and be divided by the number of items of both.
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
                "so further gradients cannot be added to them exactly: call optimizer.zero_grad() before normalize_by"
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
    """A report of the number of items behind this rank's gradients, under `normalize_by`."""

    subject = "numbers of items"
    num_bits = 49

    def __init__(self) -> None:
        self.of_ranks: tuple[int, ...] = ()
        """The items of each rank in the last step; 0 for a rank without inputs."""
        self.any_counted = False
        """Whether the gradients of the last step are sums over items."""

    def word(self, backward: Backward) -> int:
        """Return the number of items plus 1; 0 if items are not counted."""
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
                f"step {words.step}: {describe_ranks(counted)} ran this backward under normalize_by, but "
                f"{describe_ranks(others)} did not, so the gradients have no common divisor. Clear the gradients, and "
                "use normalize_by on all ranks (0 items are allowed) or on none"
            )
        self.any_counted = bool(counted)
        self.of_ranks = tuple(word - 1 if word else 0 for word in words.of_rank)

    def forget(self) -> None:
        """Reset the counts at the end of a backward."""
        self.of_ranks, self.any_counted = (), False
