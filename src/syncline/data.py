"""`DistributedSampler`: torch's class with automatic epochs, optional padding, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import torch
import torch.utils.data as torch_data

from syncline.checks import (
    checked_count,
    checked_flag,
    checked_state,
    checked_truth,
    suggests_arguments,
    what_it_is,
)
from syncline.session.world import world
from syncline.words import one_line


class _Position(NamedTuple):
    """A position in the samples of an epoch, the same on all ranks."""

    epoch: int
    used: int
    """The number of samples before this position. It can be below 0, because the samples `again` come first."""
    again: tuple[int, ...] = ()
    """Samples that come first from here on, because they were dealt to ranks that were lost."""

    def after(self, num_samples: int) -> _Position:
        """Return the position after `num_samples` further samples of all ranks."""
        return _Position(self.epoch, self.used + num_samples, self.again[num_samples:])


@suggests_arguments
class DistributedSampler(torch_data.DistributedSampler[int]):
    """A sampler that divides a dataset's indices among the ranks.

    In each epoch it yields the same indices as torch's class of this name. It differs from that class in three points.

    The epoch advances automatically: the first iteration is epoch 0, the second is epoch 1, and so on. So every epoch
    has a new order. `set_epoch(e)` sets the epoch of the next iteration to `e`. The iteration after it is epoch
    `e + 1`. Each rank counts its own iterations. So iterate equally often on all ranks, or call `set_epoch`.

    With `pad=False` no sample is repeated or omitted: together the ranks see each sample exactly once, and their
    numbers of samples differ by at most one. Use it for evaluation, with `len(batch)` as the weight of each mean. Do
    not use it for training, because ranks with unequal numbers of batches would wait for each other forever.

    The `state_dict` of the sampler is a position within an epoch. Any number of ranks can resume at this position. They
    get each unused sample once (if the samples do not divide evenly, `pad` and `drop_last` apply as usual).
    `TrainState.commit` reports used samples by calling `advance`. Samples that a DataLoader's workers have only
    prefetched do not count as used.

    Args:
        dataset: any object with a length.
        num_replicas: the number of ranks. None stands for the size of the world.
        rank: the rank that iterates, from 0 to `num_replicas - 1`. None stands for this process's rank in the world.
        shuffle: whether each epoch has its own random order, which depends on `seed + epoch`. Otherwise samples are in
            the order of the dataset.
        seed: the seed of the random order, the same on all ranks.
        drop_last: whether to omit the last samples if the samples do not divide evenly. Otherwise `pad` applies.
        pad: whether to repeat a few samples so that all ranks have equally many, as torch's class does.

    Raises:
        TypeError: the dataset has no length.
        ValueError: `rank` or `num_replicas` is invalid, or `drop_last` is combined with `pad=False`.

    Examples:
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
                "expected drop_last=True or pad=False, got both, which contradict each other: drop_last=True omits "
                "samples so that all ranks have equally many, but pad=False yields every sample exactly once. Choose "
                "one of them"
            )
        # torch types the parameter as Dataset, but takes anything with a length.
        any_dataset: Any = dataset
        super().__init__(any_dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._next_epoch = 0
        self._begun = _Position(0, 0)
        """The position at which this iteration began."""
        self._used = 0
        """The number of samples that this rank has used since this iteration began."""
        self._resumed: _Position | None = None
        """The position that was loaded, until an iteration begins there."""
        self._places: tuple[int, ...] = (rank,)
        """The ranks, out of `num_replicas`, whose samples this rank uses. `sl.steps` adds those of lost ranks."""
        self._deal = _Position(0, 0)
        """The position from which the samples were last dealt to these ranks."""
        self.when_resumed: Callable[[], object] | None = None
        """A function that is called once, when an iteration resumes at a loaded position within an epoch."""
        self._count_samples()

    def _count_samples(self) -> None:
        if not self.pad:
            # torch pads up to total_size. If total_size is the dataset's length, nothing is padded.
            self.total_size = self._num_samples
            self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def __repr__(self) -> str:
        samples = f"{self.num_samples:,} of {len(self.dataset):,} samples"  # type: ignore[arg-type]
        return one_line(self, f"{samples}, rank {self.rank} of {self.num_replicas}, epoch {self.epoch}")

    def __iter__(self) -> Iterator[int]:
        return _Dealing(self)

    def _begin(self) -> tuple[_Position, Iterator[int]]:
        """Begin the next epoch. Return the position at which it begins, and this rank's indices from there on."""
        self.epoch = self._next_epoch
        self._next_epoch += 1
        resumed, self._resumed = self._resumed, None
        self._begun, self._used = _Position(self.epoch, 0), 0
        if resumed is None or resumed.epoch != self.epoch or resumed == self._begun:
            return self._begun, super().__iter__()
        self._begun = resumed
        then, self.when_resumed = self.when_resumed, None
        if then is not None:
            then()
        return resumed, iter(self._after(resumed, self.rank))

    def _begin_places(self) -> list[list[int]]:
        """Begin the next epoch. Return the indices of each rank whose samples this rank uses, from there on."""
        begun, _ = self._begin()
        return [self._after(begun, place) for place in self._places]

    def _after(self, position: _Position, rank: int) -> list[int]:
        """Return a rank's indices of the epoch, from a position on."""
        left = self._dealt(position)
        if self.pad and left:
            order = self._ordered(position.epoch)
            extra = -len(left) % self.num_replicas
            left += (order * (1 + extra // len(order)))[:extra]
        return left[rank :: self.num_replicas]

    def _ordered(self, epoch: int) -> list[int]:
        """Return all indices in the order of an epoch."""
        if not self.shuffle:
            return list(range(self._num_samples))
        g = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self._num_samples, generator=g, device="cpu").tolist()
        return order

    def _dealt(self, position: _Position) -> list[int]:
        """Return the indices that are divided among all ranks, from a position on, without padding."""
        epoch, already, again = position
        return [*again, *self._ordered(epoch)[already + len(again) : self._end(already)]]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The iteration after it is epoch `epoch + 1`.

        If a position within `epoch` was loaded, the next iteration resumes there. Otherwise it begins at the start of
        the epoch.
        """
        epoch = checked_count("epoch", epoch)
        super().set_epoch(epoch)
        self._next_epoch = epoch

    def advance(self, num_samples: int) -> None:
        """Count the next `num_samples` samples of this rank as used, and advance the position.

        Raises:
            ValueError: `num_samples` is below 0 or above the number of samples that this rank has left in the epoch.
                Also raised if a position was loaded and no iteration has begun there, because the samples were yielded
                before the load.
        """
        num_samples = checked_count("num_samples", num_samples, at_least=0)
        if self._resumed is not None and num_samples:
            raise ValueError(
                f"expected a new iteration after a position was loaded (epoch {self._resumed.epoch}, after "
                f"{self._resumed.used} samples of all ranks), got {num_samples} used samples of an iteration that "
                "began before the load: end that iteration, and start a new one"
            )
        left = self._num_left_here
        if num_samples > left:
            raise ValueError(
                f"expected num_samples from 0 to {left}, the number of samples that rank {self.rank} has left in epoch "
                f"{self._begun.epoch}, got {num_samples}"
            )
        self._used += num_samples
        # A rank whose shard is smaller stops at the last position that all ranks have in common.
        if num_samples and self._used_by_all >= self._end(self._begun.used) - self._begun.used:
            self._begun, self._used = _Position(self._begun.epoch + 1, 0), 0

    @property
    def _used_by_all(self) -> int:
        """The number of samples that all ranks have used since this iteration began."""
        return self._used // len(self._places) * self.num_replicas

    @property
    def _num_left_here(self) -> int:
        """The number of samples that this rank has left in the epoch, after those that `advance` has counted."""
        left = self._end(self._begun.used) - self._begun.used
        if self.pad:
            return -(-left // self.num_replicas) * len(self._places) - self._used
        return len(range(self.rank, left, self.num_replicas)) - self._used

    def _end(self, already: int) -> int:
        """Return the number of samples that all ranks have used at the end of an epoch.

        Args:
            already: the number of samples that all ranks had used when the iteration began. With `drop_last` the result
                depends on it.
        """
        left = self._num_samples - already
        return (
            already + left // self.num_replicas * self.num_replicas if self.drop_last else self._num_samples
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the number of its samples that all ranks have used.

        The number is right if all ranks advance equally. The state also contains the settings that determine the order.
        """
        return self._state_at(self._resumed or self._begun.after(self._used_by_all))

    def _state_at(self, position: _Position) -> dict[str, Any]:
        epoch, already, again = position
        state = {"epoch": epoch, "used": already + len(again), **self._order()}
        return state | {"again": list(again)} if again else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position, at which the next iteration resumes.

        The number of ranks may have changed since the position was saved.

        Raises:
            TypeError, ValueError: `state` is not the state of a sampler. Or it was saved with another length of the
                dataset, another seed or another `shuffle`.
        """
        mine = self._order()
        missing = sorted({*mine, "epoch", "used"}.difference(checked_state(state)))
        if missing:
            raise ValueError(
                f"expected the state of a DistributedSampler, got a state without {', '.join(missing)}"
            )
        epoch = checked_count("epoch", state["epoch"])
        used = checked_count("used", state["used"], at_least=0)
        again = tuple(state.get("again", ()))
        differing = [
            f"{name}={state[name]!r} (this sampler has {own!r})"
            for name, own in mine.items()
            if state[name] != own
        ]
        if differing:
            raise ValueError(
                "expected the state of a sampler with the same order of samples, got a state that was saved with "
                f"{'; '.join(differing)}. Create the sampler with the saved values, or remove the sampler's state from "
                "the saved state"
            )
        self._resumed = self._deal = _Position(epoch, used - len(again), again)
        self.epoch = self._next_epoch = epoch

    def _where(self) -> tuple[int, int]:
        """Return the epoch, and the number of samples that this rank has used in it since the samples were dealt."""
        return (self._resumed.epoch, 0) if self._resumed is not None else (self._begun.epoch, self._used)

    def _place_after(self, used: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Return the position at which ranks continue after they have used unequal numbers of samples.

        It lists the unused samples before it, which come first. Each rank must have used only its own samples.

        Args:
            used: the result of `_where` on each rank. A rank without an entry has used none of its samples.
        """
        now = max(epoch for epoch, _ in used.values())
        again: list[int] = []
        for epoch in range(self._deal.epoch, now + 1):
            begun = self._deal if epoch == self._deal.epoch else _Position(epoch, 0)
            dealt = self._dealt(begun)
            end = len(dealt)
            if epoch == now:
                most = max(number for last, number in used.values() if last == now)
                end = min(end, max(most * self.num_replicas, len(begun.again)))
            for index in range(end):
                last, number = used.get(index % self.num_replicas, (-1, 0))
                if last < epoch or (last == epoch and index // self.num_replicas >= number):
                    again.append(dealt[index])
        if end == len(dealt) and not again:
            return self._state_at(_Position(now + 1, 0))
        return self._state_at(_Position(now, begun.used + end - len(again), tuple(again)))

    def _deal_to(self, num_replicas: int, places: Sequence[int]) -> None:
        """Divide the remaining samples of the epoch among another number of ranks, from the next iteration on.

        All samples that were used must have been counted by `advance`, on all ranks.

        Args:
            num_replicas: the number of ranks from now on.
            places: the ranks among them whose samples this process uses: its own, or several.

        Raises:
            ValueError: there are several places, and `pad` is False, so that they have unequal numbers of samples.
        """
        self._deal_from(self.state_dict(), num_replicas, places)

    def _deal_from(self, place: Mapping[str, Any], num_replicas: int, places: Sequence[int]) -> None:
        """Divide the samples from a position on; see `_deal_to`."""
        if len(places) > 1 and not self.pad:
            raise ValueError(
                "expected a sampler with pad=True, got pad=False, with which one rank cannot use the samples of two, "
                "because their numbers differ"
            )
        super().__init__(self.dataset, num_replicas, places[0], self.shuffle, self.seed, self.drop_last)
        self._places = tuple(places)
        self._count_samples()
        self.load_state_dict(place)

    @property
    def _num_samples(self) -> int:
        """The number of samples in the dataset."""
        dataset: Any = self.dataset
        return len(dataset)

    def _order(self) -> dict[str, Any]:
        """Return the settings that determine the order of samples, by name."""
        return {"num_samples": self._num_samples, "shuffle": self.shuffle, "seed": self.seed}


class _Dealing(Iterator[int]):
    """One iteration of a sampler.

    The epoch begins when the first index is requested, because a DataLoader may create iterators that it does not use.
    The state of the iteration is the position after the last index that it has yielded. torchdata's StatefulDataLoader
    saves this state, and takes into account how many indices its workers have only prefetched. So it does not need
    `advance`.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self._indices: Iterator[int] | None = None
        self._begun = _Position(0, 0)
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
        position = self._begun.after(self._num_dealt * self._sampler.num_replicas)
        if position.used >= self._sampler._end(self._begun.used):
            position = _Position(position.epoch + 1, 0)
        return self._sampler._state_at(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._indices, self._num_dealt = None, 0


def _check_dataset(dataset: Sized) -> None:
    if isinstance(dataset, type) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"expected dataset to have a length, got {what_it_is(dataset)}: if the dataset is a stream of samples "
            "without indices, use no sampler, and let the dataset yield only the samples of its rank"
        )


def place_to_resume(
    own: Mapping[str, Any], first: Mapping[str, Any], *, rank: int, num_ranks: int
) -> Mapping[str, Any]:
    """Return the position at which a rank resumes: its own position, or that of rank 0.

    With `pad=False`, a rank that has used all of its samples does not know whether other ranks have one sample left.
    Rank 0 knows it, because no rank has more samples than rank 0. So if a rank has used all of its
    samples and rank 0 has ended the epoch, the position of rank 0 is returned.

    Args:
        own: the position that the rank saved.
        first: the position that rank 0 saved.
        rank: the rank that saved `own`.
        num_ranks: the number of ranks that saved.

    Examples:
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
