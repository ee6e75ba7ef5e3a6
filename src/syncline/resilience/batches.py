"""The batches of one rank in `sl.steps`, epoch after epoch, and the samples that ranks have used.

[Note: the global batch]

With `keep_global_batch=True`, every step has the batches of all ranks with which the loop began. Each of these ranks
has a *place*. If ranks are lost, the remaining ones serve several places: in each step they use one batch of every
place that they serve. So each step has the same samples as if no rank had been lost.

[Note: the samples of a lost rank]

Under `LocalSGD` and similar strategies, the steps that a rank has made since the last sync are lost with it. So the
samples of these steps are dealt again. Those of earlier steps count as used, because the parameters of the other ranks
contain them. The remaining ranks may have made unequal numbers of steps since then. All their samples count as used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Sampler

from syncline.checkpoint.train_state import sampler_of
from syncline.checks import what_it_is
from syncline.data import DistributedSampler
from syncline.errors import SynclineError
from syncline.strategies.execution import Rounds
from syncline.transport.base import Transport


class Batches:
    """The batches of this rank, epoch after epoch.

    Args:
        data: the batches; None if the program takes them from elsewhere.
        sampler: the sampler of the training state; None if it has none.
        num_places: the number of batches of all ranks in a step, if it is kept when ranks are lost; else None.

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
        """The number of batches that this rank uses in each step."""
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
        """Divide the unused samples of the epoch among the present ranks, and start a new iteration over them.

        Args:
            num_ranks: the number of ranks.
            rank: this process's rank among them.
            place: the position in the epoch from which samples are dealt; None if all ranks have used equally many.
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


class Samples:
    """The samples of one training state, which follow the membership.

    Args:
        sampler: the sampler, if there is one.
        rounds: the executions of the strategies under which replicas drift.
    """

    def __init__(self, sampler: DistributedSampler | None, rounds: Sequence[Rounds]) -> None:
        self.sampler = sampler
        self._rounds = rounds
        self._history: list[tuple[list[int], tuple[int, int]]] = []
        """For each step since the last sync: the step counts of the strategies, and the sampler's position after it."""
        self._is_new = self._has_loaded = False
        """Whether this rank has joined, or has loaded the state of another rank, since the samples were dealt."""
        self._lost: dict[int, tuple[int, int]] = {}
        """The sampler positions of lost ranks, after their last steps whose changes the parameters contain."""
        self._used: dict[int, tuple[int, int]] = {}
        """The sampler positions of the present ranks."""
        self._dealer = 0
        """The rank that computes the position from which the samples are dealt."""
        self.note()

    def note(self) -> None:
        """Record the position of the sampler. Call it after each step, when its samples have been counted as used."""
        if self.sampler is None or not self._rounds:
            return
        self._history.append(([rounds.step for rounds in self._rounds], self.sampler._where()))
        del self._history[: self._index_of([rounds.contained for rounds in self._rounds])]

    def _index_of(self, steps: Sequence[int]) -> int:
        """Return the index of the first entry in which each module has made at least its number of `steps`."""
        for index, (then, _) in enumerate(self._history):
            if all(number >= step for number, step in zip(then, steps, strict=True)):
                return index
        return len(self._history) - 1

    def meet(self, transport: Transport, *, is_new: bool, has_loaded: bool) -> None:
        """Exchange the sampler positions of all ranks. Call it on all ranks, before the parameters are synced.

        Args:
            transport: the transport between the ranks.
            is_new: whether this rank has just joined.
            has_loaded: whether this rank has loaded the state of another rank, with its place in the data.
        """
        sampler = self.sampler
        if sampler is None:
            return
        self._is_new |= is_new
        self._has_loaded |= has_loaded
        mine = None if self._is_new else [sampler.rank, None if self._has_loaded else sampler._where()]
        rows = [json.loads(row) for row in transport.all_gather_bytes(json.dumps(mine).encode())]
        here = {row[0]: row[1] for row in rows if row is not None}
        # The samples of a rank count up to its last step that the parameters of the others contain now.
        contained = self._history[self._index_of([rounds.contained for rounds in self._rounds])][1]
        for rank in range(sampler.num_replicas):
            if rank not in here:
                self._lost.setdefault(rank, contained)
        owners = [number for number, row in enumerate(rows) if row is not None and row[1] is not None]
        self._dealer = owners[0] if owners else 0
        first = tuple(rows[owners[0]][1]) if owners else sampler._where()
        self._used = {rank: first if where is None else tuple(where) for rank, where in here.items()}

    def place_after_meeting(self, transport: Transport) -> dict[str, Any] | None:
        """Return the position from which the samples are dealt to the present ranks. A collective call, after `meet`.

        Return None if there is no sampler.
        """
        if self.sampler is None:
            return None
        place = {}
        if transport.rank == self._dealer:
            has_place = self._is_new or self._has_loaded
            place = (
                self.sampler.state_dict() if has_place else self.sampler._place_after(self._lost | self._used)
            )
        found: dict[str, Any] = json.loads(
            transport.all_gather_bytes(json.dumps(place).encode())[self._dealer]
        )
        return found

    def were_dealt(self) -> None:
        """Record that the remaining samples were dealt to the present ranks."""
        self._is_new = self._has_loaded = False
        self._lost.clear()
        self._history.clear()
        self.note()
