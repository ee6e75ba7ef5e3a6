"""`DistributedSampler`: torch's, without its two traps (the forgotten epoch, the duplicated samples)."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data as torch_data

from syncline.world import world

__all__ = ["DistributedSampler"]


class DistributedSampler(torch_data.DistributedSampler[int]):
    """Deals a dataset's indices out to the ranks; for the same epoch, the very indices that torch deals.

    It differs from torch's class in two points.

    The epoch moves by itself: the first iteration is epoch 0, the next one epoch 1, and so on, so that
    every epoch is shuffled anew. `set_epoch(e)` wins for the iteration that follows; the one after is
    `e + 1`. Each rank counts for itself: iterate equally often on all ranks, or call `set_epoch`.

    With `pad=False` no sample is repeated or left out: together the ranks see each one exactly once,
    and they differ by at most one sample. Use it for evaluation, with `len(batch)` as weight of the
    mean; in training, ranks with unequal numbers of batches would wait for each other in vain.

    Args:
        dataset: anything with a length.
        num_replicas: number of ranks to deal to; None means the world's size.
        rank: the rank to deal for, 0 to `num_replicas - 1`; None means the world's rank.
        shuffle: whether each epoch has an order of its own, drawn from `seed + epoch`.
        seed: the same on all ranks.
        drop_last: leave out the tail that does not divide evenly, instead of repeating samples.
        pad: repeat a few samples so that all ranks have equally many (torch's behaviour).

    Raises:
        TypeError: the dataset has no length.
        ValueError: a rank or a number of replicas that cannot be, or `drop_last` together with `pad=False`.

    Example:
        >>> ranks = [DistributedSampler(range(5), 2, rank, shuffle=False, pad=False) for rank in (0, 1)]
        >>> [list(sampler) for sampler in ranks]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        if num_replicas is None:
            num_replicas = world().size
        if rank is None:
            rank = world().rank
        _check(dataset, num_replicas, rank, drop_last=drop_last, pad=pad)
        # torch types the parameter as Dataset, but takes anything with a length.
        any_dataset: Any = dataset
        super().__init__(any_dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._next_epoch = 0
        if not pad:
            # torch's __iter__ fills up to total_size and takes every num_replicas-th index from there:
            # with nothing to fill, what is left is exact.
            self.total_size = len(dataset)
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        # A generator, so that the epoch is taken with the first index: a DataLoader with workers and
        # batch_size=None makes two iterators and uses one.
        self.epoch = self._next_epoch
        self._next_epoch += 1
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; without a further call the one after is `epoch + 1`."""
        super().set_epoch(epoch)
        self._next_epoch = epoch


def _check(dataset: Sized, num_replicas: int, rank: int, *, drop_last: bool, pad: bool) -> None:
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"expected a dataset with a length, got {type(dataset).__name__}: samples that only come as a "
            "stream have no indices to deal out; split the stream by rank inside the dataset"
        )
    if num_replicas < 1:
        raise ValueError(f"expected num_replicas of at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"expected rank between 0 and {num_replicas - 1} (num_replicas={num_replicas}), got {rank}"
        )
    if drop_last and not pad:
        raise ValueError(
            "drop_last=True contradicts pad=False: the first leaves samples out so that all ranks have "
            "equally many, the second deals out every sample exactly once; choose one"
        )
