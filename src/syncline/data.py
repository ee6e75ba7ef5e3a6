"""`DistributedSampler`: torch's class, without forgotten epochs, duplicated samples and lost positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.utils.data as torch_data

from syncline.checks import checked_count, checked_flag, checked_state, checked_truth, what_it_is
from syncline.session.world import world


class DistributedSampler(torch_data.DistributedSampler[int]):
    """A sampler that deals a dataset's indices out to the ranks; per epoch, the same indices as torch's class.

    It differs from torch's class in three points.

    The epoch advances automatically: the first iteration is epoch 0, the next one epoch 1, and so on, so that
    every epoch has a new order. `set_epoch(e)` sets the epoch of the next iteration; the one after it is `e + 1`. Each
    rank counts its own iterations: iterate equally often on all ranks, or call `set_epoch`.

    With `pad=False` no sample is repeated or left out: together the ranks see each sample exactly once, and their
    counts differ by at most one. Use it for evaluation, with `len(batch)` as the weight of the mean. In training,
    ranks with unequal numbers of batches would wait for each other forever.

    Its `state_dict` is a position within an epoch. Any number of ranks can resume from it; they get each unused sample
    once (if the samples do not divide evenly, `pad` and `drop_last` apply as usual). `TrainState.commit` reports
    used samples through `advance`; samples that a DataLoader's workers have only prefetched do not count.

    Args:
        dataset: any object with a length.
        num_replicas: number of ranks to deal to; None means the world's size.
        rank: the rank to deal for, 0 to `num_replicas - 1`; None means the world's rank.
        shuffle: give each epoch its own order, drawn from `seed + epoch`.
        seed: the seed of the order, the same on all ranks.
        drop_last: leave out the tail that does not divide evenly, instead of repeating samples.
        pad: repeat a few samples so that all ranks have equally many (torch's behaviour).

    Raises:
        TypeError: the dataset has no length.
        ValueError: a rank or number of replicas is invalid, or `drop_last` is combined with `pad=False`.

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
        _check_dataset(dataset)
        num_replicas = checked_count("num_replicas", num_replicas, at_least=1)
        rank = checked_count("rank", rank, at_least=0, at_most=num_replicas - 1)
        shuffle, drop_last = checked_truth("shuffle", shuffle), checked_truth("drop_last", drop_last)
        seed = checked_count("seed", seed)
        if not checked_flag("pad", pad) and drop_last:
            raise ValueError(
                "drop_last=True contradicts pad=False: the first leaves samples out so that all ranks have "
                "equally many, the second yields every sample exactly once; choose one"
            )
        # torch types the parameter as Dataset, but takes anything with a length.
        any_dataset: Any = dataset
        super().__init__(any_dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._next_epoch = 0
        self._begun = (0, 0)
        """The current epoch, and how many of its samples all ranks had used when it began here."""
        self._used = 0
        """Number of samples that this rank has used since then."""
        self._resumed: tuple[int, int] | None = None
        """The same two numbers for an epoch that was loaded and has not begun yet."""
        self.when_resumed: Callable[[], object] | None = None
        """Called once, when an epoch resumes at a loaded position."""
        if not pad:
            # torch pads up to total_size. If that is the dataset's length, nothing is padded.
            self.total_size = len(dataset)
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        return _Dealing(self)

    def _begin(self) -> tuple[tuple[int, int], Iterator[int]]:
        """Take the next epoch; return its position at the start, and this rank's indices."""
        self.epoch = self._next_epoch
        self._next_epoch += 1
        resumed, self._resumed = self._resumed, None
        self._begun = resumed if resumed and resumed[0] == self.epoch else (self.epoch, 0)
        self._used = 0
        _, already = self._begun
        if not already:
            return self._begun, super().__iter__()
        then, self.when_resumed = self.when_resumed, None
        if then is not None:
            then()
        return self._begun, iter(self._after(already))

    def _after(self, already: int) -> list[int]:
        """Return this rank's indices of the epoch, without the first `already` samples of all ranks."""
        order = list(range(self._num_samples))
        if self.shuffle:
            g = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=g).tolist()
        left = order[already : self._end(already)]
        if self.pad and left:
            extra = -len(left) % self.num_replicas
            left += (order * (1 + extra // len(order)))[:extra]
        return left[self.rank :: self.num_replicas]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without a further call, the one after it is `epoch + 1`.

        An epoch that was loaded at a position resumes there. Any other epoch begins at its start.
        """
        epoch = checked_count("epoch", epoch)
        super().set_epoch(epoch)
        self._next_epoch = epoch

    def advance(self, num_samples: int) -> None:
        """Count the next `num_samples` samples of this rank as used, and advance its position.

        Raises:
            ValueError: `num_samples` is below 0 or more than the epoch has left; or a position was loaded and no
                iteration has begun there yet, so samples from before the load would be counted.
        """
        num_samples = checked_count("num_samples", num_samples, at_least=0)
        if self._resumed is not None and num_samples:
            raise ValueError(
                f"got {num_samples} samples, but a place was loaded (epoch {self._resumed[0]}, after "
                f"{self._resumed[1]} samples of all ranks), and nothing was dealt from there yet: leave the iteration "
                "that was under way before, and iterate anew"
            )
        epoch, already = self._begun
        left = self._num_left(already) - self._used
        if num_samples > left:
            raise ValueError(
                f"expected num_samples from 0 to {left}, the number that is left of epoch {epoch} on rank {self.rank}, "
                f"got {num_samples}"
            )
        self._used += num_samples
        # A rank whose shard is smaller stops at the last position that all ranks have in common.
        if num_samples and already + self._used * self.num_replicas >= self._end(already):
            self._begun, self._used = (epoch + 1, 0), 0

    def _end(self, already: int) -> int:
        """Return the number of samples used at the end of an epoch that began here with `already` used samples."""
        left = self._num_samples - already
        return (
            already + left // self.num_replicas * self.num_replicas if self.drop_last else self._num_samples
        )

    def _num_left(self, already: int) -> int:
        """Return how many samples this rank has left in an epoch that began with `already` used samples."""
        left = self._end(already) - already
        return -(-left // self.num_replicas) if self.pad else len(range(self.rank, left, self.num_replicas))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the samples used by all ranks together, if they advance alike."""
        epoch, already = self._resumed or self._begun
        if not self._resumed:
            already += self._used * self.num_replicas
        return self._place(epoch, already)

    def _place(self, epoch: int, used: int) -> dict[str, Any]:
        return {"epoch": epoch, "used": used, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, which may come from another number of ranks.

        Raises:
            TypeError, ValueError: it is not a sampler's state, or the dataset's length, the seed or `shuffle` differs.
        """
        mine = self._order()
        missing = sorted({*mine, "epoch", "used"}.difference(checked_state(state)))
        if missing:
            raise ValueError(
                f"expected the state of a DistributedSampler, got one without {', '.join(missing)}"
            )
        epoch = checked_count("epoch", state["epoch"])
        used = checked_count("used", state["used"], at_least=0)
        differing = [
            f"{name}={state[name]!r}, here {own!r}" for name, own in mine.items() if state[name] != own
        ]
        if differing:
            raise ValueError(
                f"expected the place of a sampler that deals in the same order; it was saved with "
                f"{'; '.join(differing)}. Make the sampler as it was, or leave it out of the state"
            )
        self._resumed = (epoch, used)
        self.epoch = self._next_epoch = epoch

    @property
    def _num_samples(self) -> int:
        """Number of samples in the dataset."""
        dataset: Any = self.dataset
        return len(dataset)

    def _order(self) -> dict[str, Any]:
        """Return the settings that determine the order of samples."""
        return {"num_samples": self._num_samples, "shuffle": self.shuffle, "seed": self.seed}


class _Dealing(Iterator[int]):
    """One iteration. It takes the epoch with the first index, because a DataLoader may not use every iterator it makes.

    Its state is the position after the last index that it dealt. torchdata's StatefulDataLoader saves this state, and
    knows how many indices its workers have only prefetched; `advance` is not involved.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self._indices: Iterator[int] | None = None
        self._begun = (0, 0)
        self._num_dealt = 0

    def __next__(self) -> int:
        if self._indices is None:
            self._begun, self._indices = self._sampler._begin()
        index = next(self._indices)
        self._num_dealt += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        if self._indices is None:
            return self._sampler.state_dict()
        epoch, already = self._begun
        used = already + self._num_dealt * self._sampler.num_replicas
        if used >= self._sampler._end(already):
            epoch, used = epoch + 1, 0
        return self._sampler._place(epoch, used)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._indices, self._num_dealt = None, 0


def _check_dataset(dataset: Sized) -> None:
    if isinstance(dataset, type) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"expected dataset to have a length, got {what_it_is(dataset)}: samples that only come as a stream have no "
            "indices to deal out; split the stream by rank inside the dataset"
        )


def place_to_resume(
    own: Mapping[str, Any], first: Mapping[str, Any], *, rank: int, num_ranks: int
) -> Mapping[str, Any]:
    """Return a rank's saved position, or rank 0's if the rank was at the end of an epoch that rank 0 had left.

    With `pad=False` a rank with the smaller shard cannot see whether others have one sample left. Rank 0 can, because
    no rank has more samples.

    Args:
        own: the position that the rank saved.
        first: the position that rank 0 saved.
        rank: the rank that saved `own`.
        num_ranks: how many ranks saved.

    Example:
        >>> ranks = [DistributedSampler(range(5), 2, rank, pad=False) for rank in (0, 1)]
        >>> for sampler in ranks:
        ...     sampler.advance(len(list(sampler)))
        >>> first, own = (sampler.state_dict() for sampler in ranks)
        >>> place = place_to_resume(own, first, rank=1, num_ranks=2)
        >>> [(one["epoch"], one["used"]) for one in (first, own, place)]
        [(1, 0), (0, 4), (1, 0)]
    """
    is_over = not range(own["used"] + rank, own["num_samples"], num_ranks)
    return first if is_over and own["epoch"] < first["epoch"] else own
