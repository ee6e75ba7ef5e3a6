"""`DistributedSampler`: torch's class, with automatic epochs, optional padding, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.utils.data as torch_data

from syncline.checks import checked_count, checked_flag, checked_state, checked_truth, what_it_is
from syncline.session.world import world


class DistributedSampler(torch_data.DistributedSampler[int]):
    """A sampler that divides a dataset's indices among the ranks. In each epoch it yields the indices of torch's class.

    It differs from torch's class in three points.

    The epoch advances automatically: the first iteration is epoch 0, the next iteration is epoch 1, and so on, so that
    every epoch has a new order. `set_epoch(e)` sets the epoch of the next iteration; the iteration after it is epoch
    `e + 1`. Each rank counts its own iterations. So iterate equally often on all ranks, or call `set_epoch`.

    With `pad=False` no sample is repeated or omitted: together the ranks see each sample exactly once, and their
    numbers of samples differ by at most one. Use it for evaluation, with `len(batch)` as the weight of the mean. Do not
    use it for training, in which ranks with unequal numbers of batches would wait for each other forever.

    Its `state_dict` is a position within an epoch. Any number of ranks can resume there. They get each unused sample
    once (if the samples do not divide evenly, `pad` and `drop_last` apply as usual). `TrainState.commit` reports
    used samples through `advance`. Samples that a DataLoader's workers have only prefetched do not count.

    Args:
        dataset: any object with a length.
        num_replicas: the number of ranks; None for the world's size.
        rank: the rank that iterates, from 0 to `num_replicas - 1`; None for the world's rank.
        shuffle: whether each epoch has its own order, drawn from `seed + epoch`.
        seed: the seed of the order, the same on all ranks.
        drop_last: whether to omit the last samples if they do not divide evenly, instead of repeating samples.
        pad: whether to repeat a few samples so that all ranks have equally many, as torch's class does.

    Raises:
        TypeError: the dataset has no length.
        ValueError: `rank` or `num_replicas` is invalid, or `drop_last` is combined with `pad=False`.

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
                "expected drop_last=True or pad=False, got both: drop_last=True omits samples so that all ranks have "
                "equally many, and pad=False yields every sample exactly once. Choose one of them"
            )
        # torch types the parameter as Dataset, but takes anything with a length.
        any_dataset: Any = dataset
        super().__init__(any_dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._next_epoch = 0
        self._begun = (0, 0)
        """The current epoch, and how many of its samples all ranks together had used when this iteration began."""
        self._used = 0
        """Number of samples that this rank has used since this iteration began."""
        self._resumed: tuple[int, int] | None = None
        """The epoch and the number of used samples of a position that was loaded, if no iteration has begun there."""
        self.when_resumed: Callable[[], object] | None = None
        """Called once, when an epoch resumes at a loaded position."""
        if not pad:
            # torch pads up to total_size. If total_size is the dataset's length, nothing is padded.
            self.total_size = len(dataset)
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        return _Dealing(self)

    def _begin(self) -> tuple[tuple[int, int], Iterator[int]]:
        """Begin the next epoch; return the position at which it begins, and this rank's indices."""
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
        """Set the epoch of the next iteration. Without a further call, the iteration after it is epoch `epoch + 1`.

        If a position in this epoch was loaded, the iteration resumes there. Otherwise it begins at the start of the
        epoch.
        """
        epoch = checked_count("epoch", epoch)
        super().set_epoch(epoch)
        self._next_epoch = epoch

    def advance(self, num_samples: int) -> None:
        """Count the next `num_samples` samples of this rank as used, and advance the position.

        Raises:
            ValueError: `num_samples` is below 0, or more than this rank has left in the epoch; or a position was loaded
                and no iteration has begun there, so samples from before the load would be counted.
        """
        num_samples = checked_count("num_samples", num_samples, at_least=0)
        if self._resumed is not None and num_samples:
            raise ValueError(
                f"got {num_samples} used samples, but a position was loaded (epoch {self._resumed[0]}, after "
                f"{self._resumed[1]} samples of all ranks) and no iteration has begun there: end the iteration that "
                "began before the load, and start a new iteration"
            )
        epoch, already = self._begun
        left = self._num_left(already) - self._used
        if num_samples > left:
            raise ValueError(
                f"expected num_samples from 0 to {left}, the number of samples that rank {self.rank} has left in epoch "
                f"{epoch}, got {num_samples}"
            )
        self._used += num_samples
        # A rank whose shard is smaller stops at the last position that all ranks have in common.
        if num_samples and already + self._used * self.num_replicas >= self._end(already):
            self._begun, self._used = (epoch + 1, 0), 0

    def _end(self, already: int) -> int:
        """Return the number of samples used at the end of an epoch that was begun after `already` used samples."""
        left = self._num_samples - already
        return (
            already + left // self.num_replicas * self.num_replicas if self.drop_last else self._num_samples
        )

    def _num_left(self, already: int) -> int:
        """Return how many samples this rank has left in an epoch that was begun after `already` used samples."""
        left = self._end(already) - already
        return -(-left // self.num_replicas) if self.pad else len(range(self.rank, left, self.num_replicas))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the number of samples used by all ranks together, if all ranks advance equally."""
        epoch, already = self._resumed or self._begun
        if not self._resumed:
            already += self._used * self.num_replicas
        return self._place(epoch, already)

    def _place(self, epoch: int, used: int) -> dict[str, Any]:
        return {"epoch": epoch, "used": used, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, which may come from another number of ranks.

        Raises:
            TypeError, ValueError: `state` is not a sampler's state, or was saved with another length of the dataset,
                seed or `shuffle`.
        """
        mine = self._order()
        missing = sorted({*mine, "epoch", "used"}.difference(checked_state(state)))
        if missing:
            raise ValueError(
                f"expected the state of a DistributedSampler, got a state without {', '.join(missing)}"
            )
        epoch = checked_count("epoch", state["epoch"])
        used = checked_count("used", state["used"], at_least=0)
        differing = [
            f"{name}={state[name]!r} (this sampler has {own!r})"
            for name, own in mine.items()
            if state[name] != own
        ]
        if differing:
            raise ValueError(
                "expected the position of a sampler with the same order of samples, but it was saved with "
                f"{'; '.join(differing)}. Create the sampler with the saved values, or remove it from the state"
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
    """One iteration of a sampler.

    It begins its epoch with the first index, because a DataLoader may create iterators that it does not use. Its state
    is the position after the last index that it has yielded. torchdata's StatefulDataLoader saves this state, and knows
    how many indices its workers have only prefetched. `advance` is not needed for that.
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
            f"expected dataset to have a length, got {what_it_is(dataset)}: if the dataset is a stream of samples "
            "without indices, divide the stream by rank inside of the dataset"
        )


def place_to_resume(
    own: Mapping[str, Any], first: Mapping[str, Any], *, rank: int, num_ranks: int
) -> Mapping[str, Any]:
    """Return the position at which a rank resumes: its own, or rank 0's if only rank 0 knows that the epoch has ended.

    With `pad=False`, a rank with fewer samples does not know whether other ranks have one sample left. Rank 0 knows,
    because no rank has more samples than rank 0.

    Args:
        own: the position that the rank saved.
        first: the position that rank 0 saved.
        rank: the rank that saved `own`.
        num_ranks: the number of ranks that saved.

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
