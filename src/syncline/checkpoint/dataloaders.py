"""What DataLoaders do that a resumed run would do otherwise: noticed, for it cannot be made up for."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from syncline.data.sampler import DistributedSampler
from syncline.words import format_count

__all__ = ["Places", "dealer_of", "remarks_on_loaders", "remarks_on_places"]


_ENOUGH_STEPS = 3
"""So many steps in which a place has not moved: a stream may take several batches from one block."""


def dealer_of(one: Any) -> DistributedSampler | None:
    """The sampler that deals out the samples, for a loader that has it inside, too."""
    for sampler in (
        one,
        getattr(one, "sampler", None),
        getattr(getattr(one, "batch_sampler", None), "sampler", None),
    ):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


class Places:
    """Watches whether the places of streams move from step to step, until they have moved once.

    The workers of a DataLoader read copies of a stream, so that the place of the one that is saved stays where it was.

    Args:
        named: what is saved, by name.

    Example:
        >>> class Stream(IterableDataset[int]):
        ...     def __iter__(self):
        ...         return iter(range(8))
        ...     def state_dict(self):
        ...         return {"next": 0}
        >>> places = Places({"data": Stream()})
        >>> for _ in range(4):
        ...     places.step_ended()
        >>> places.standing
        ['data']
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._watched: dict[str, Any] = {
            name: one
            for name, one in named.items()
            if isinstance(one, IterableDataset)
            or (name == "sampler" and not isinstance(one, DataLoader) and dealer_of(one) is None)
        }
        self._last: dict[str, Any] = {}
        self._num_equal = dict.fromkeys(self._watched, 0)
        self.standing: list[str] = []
        """The names of what has not moved in several steps."""

    def step_ended(self) -> None:
        """Batches were taken."""
        for name, one in list(self._watched.items()):
            place = deepcopy(one.state_dict())
            if name in self._last:
                self._num_equal[name] += 1
                if not _is_same(self._last[name], place):
                    del self._watched[name]
                elif self._num_equal[name] == _ENOUGH_STEPS:
                    del self._watched[name]
                    self.standing.append(name)
            self._last[name] = place


def remarks_on_places(named: Mapping[str, Any], standing: Sequence[str]) -> Iterator[str]:
    """Sentences on streams that a run that resumes would read again.

    Args:
        named: what is saved, by name.
        standing: see `Places`.
    """
    for name in standing:
        yield (
            f"the place of {name} ({type(named[name]).__name__}) has not moved in {_ENOUGH_STEPS} steps, so a run that "
            "resumes would read the same samples again. Do the workers of a DataLoader read it? They read copies: use "
            "num_workers=0, or torchdata's StatefulDataLoader, sl.TrainState(sampler=loader)"
        )


def remarks_on_loaders(named: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on DataLoaders of this process whose random numbers a run that resumes would not draw alike.

    All objects of the process are looked through, once: some ten milliseconds.

    Args:
        named: what is saved, by name.
    """
    names = {id(one): name for name, one in named.items()}
    for loader in _all_loaders():
        if getattr(loader, "generator", None) is not None:
            continue
        stream = names.get(id(loader.dataset))
        if loader.persistent_workers:
            when = "once in a run, for persistent_workers=True"
        elif stream is not None and isinstance(loader.dataset, IterableDataset):
            when = f"whenever it begins to read {stream}"
        elif id(loader) in names and dealer_of(loader) is None:
            when = "whenever it begins"
        else:
            continue  # its epochs begin alike, or the sampler sets the numbers back
        what = f"{type(loader.dataset).__name__} ({format_count(loader.num_workers, 'worker')})"
        yield (
            f"a DataLoader of {what} draws from torch's global generator {when}. A run that resumes draws a number "
            "that this one does not, and dropout and the like differ from there on: give it a generator of its own, "
            "generator=torch.Generator()"
        )


def _all_loaders() -> list[DataLoader[Any]]:
    """Return every DataLoader of this process: an object refers to its class."""
    kinds: list[type] = [DataLoader]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)
