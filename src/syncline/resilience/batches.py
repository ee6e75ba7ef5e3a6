"""The batches of one rank in `sl.steps`, epoch after epoch, and how many samples they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from syncline.checkpoint.dataloaders import sampler_of
from syncline.errors import SynclineError


class Batches:
    """The batches of this rank, epoch after epoch."""

    def __init__(self, data: Iterable[Any] | None) -> None:
        self._data = data
        self._iterator: Iterator[Any] | None = None

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
                return batch, _num_samples(data, num_taken)
            self._iterator = None  # the epoch has ended
        raise ValueError(
            "expected data to have at least one batch, got none: the dataset is empty, or this rank's part of it"
        )

    def begin_again(self) -> None:
        """Begin a new iteration at the position of the sampler."""
        self._iterator = None


def _num_samples(data: Any, num_taken: int) -> int | None:
    """Return the number of samples of the batch that was just taken; None if it is unknown."""
    sampler = sampler_of(data)
    size = data.batch_size if isinstance(data, DataLoader) else None
    return None if size is None or sampler is None else min(size, sampler._num_left_here - num_taken)
