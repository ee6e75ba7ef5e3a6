"""The batches of one rank in `sl.steps`, epoch after epoch, and how many samples they have.

[Note: the global batch]

With `keep_global_batch=True`, every step has the batches of all ranks with which the loop began. Each of these ranks
has a *place*. If ranks are lost, the remaining ones serve several places: in each step they use one batch of every
place that they serve. So each step has the same samples as if no rank had been lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Sampler

from syncline.checkpoint.dataloaders import sampler_of
from syncline.checks import what_it_is
from syncline.data import DistributedSampler
from syncline.errors import SynclineError


class Batches:
    """The batches of this rank, epoch after epoch.

    Args:
        data: the batches; None if the program takes them from elsewhere.
        sampler: the sampler of the training state; None if it has none.
        num_places: the number of batches of all ranks in a step, if it stays the same when ranks are lost; else None.

    Raises:
        ValueError: the number of batches cannot stay the same with this data.
    """

    def __init__(
        self, data: Iterable[Any] | None, sampler: DistributedSampler | None, num_places: int | None
    ) -> None:
        self._data = data
        self._sampler = sampler
        self._iterator: Iterator[Any] | None = None
        self._num_places = num_places
        self.num_each_step = 1
        """How many batches this rank uses in each step."""
        if num_places is None:
            return
        loader: Any = data
        if sampler is None or sampler_of(data) is not sampler or getattr(loader, "batch_size", None) is None:
            raise ValueError(
                "keep_global_batch=True expects data to be a DataLoader with a batch_size and with the "
                f"sl.DistributedSampler of the state as its sampler, got {what_it_is(data)}"
            )
        # The loader refuses another batch sampler after its construction. It reads it only when an iteration begins.
        vars(loader)["batch_sampler"] = _BatchesOfPlaces(sampler, loader.batch_size, loader.drop_last)

    def deal(self, num_ranks: int, rank: int, place: Mapping[str, Any] | None = None) -> None:
        """Divide the unused samples of the epoch among the present ranks, and begin a new iteration there.

        Args:
            num_ranks: the number of ranks.
            rank: this process's rank among them.
            place: the position from which they are dealt; None if all ranks have used equally many.
        """
        self._iterator = None
        places, self.num_each_step = [rank], 1
        if self._num_places is not None:
            places, num_ranks = places_of(rank, num_ranks, self._num_places), self._num_places
            self.num_each_step = len(places)
        if self._sampler is not None:
            if place is None:
                self._sampler._deal_to(num_ranks, places)
            else:
                self._sampler._deal_from(place, num_ranks, places)

    def take(self, num_taken: int) -> tuple[Any, int | None]:
        """Return the next batch, and its number of samples if it is known.

        Args:
            num_taken: the number of samples that were taken since the last commit.

        Raises:
            SynclineError: no data was given.
            ValueError: the data has no batch.
        """
        data = self._data
        if data is None:
            raise SynclineError(
                "next_batch() needs the batches: give them to sl.steps(state, until, data=loader)"
            )
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(data)
            for batch in self._iterator:
                return batch, _num_samples(data, num_taken, self.num_each_step)
            self._iterator = None  # the epoch has ended
        raise ValueError(
            "expected data to have at least one batch, got none: the dataset is empty, or this rank's part of it"
        )


class _BatchesOfPlaces(Sampler[list[int]]):
    """One batch of indices of each place that this rank serves, then the next one of each.

    Args:
        sampler: the sampler, which knows the places.
        batch_size, drop_last: as in DataLoader.
    """

    def __init__(self, sampler: DistributedSampler, batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        of_places = self.sampler._begin_places()
        for start in range(0, self._num_samples(len(of_places[0])), self.batch_size):
            for indices in of_places:
                yield indices[start : start + self.batch_size]

    def __len__(self) -> int:
        num_places = len(self.sampler._places)
        return num_places * -(-self._num_samples(self.sampler.num_samples) // self.batch_size)

    def _num_samples(self, of_place: int) -> int:
        """Return how many of the samples of a place are used."""
        return of_place // self.batch_size * self.batch_size if self.drop_last else of_place


def places_of(rank: int, num_ranks: int, num_places: int) -> list[int]:
    """Return the places that a rank serves.

    Examples:
        >>> [places_of(rank, 3, 4) for rank in range(3)]
        [[0, 3], [1], [2]]
    """
    return list(range(rank, num_places, num_ranks))


def _num_samples(data: Any, num_taken: int, num_places: int) -> int | None:
    """Return the number of samples of the batch that was just taken; None if it is unknown."""
    sampler = sampler_of(data)
    size = data.batch_size if isinstance(data, DataLoader) else None
    if size is None or sampler is None:
        return None
    if num_places == 1:
        return min(size, sampler._num_left_here - num_taken)
    return min(size, sampler._num_left_here // num_places - num_taken // (num_places * size) * size)
