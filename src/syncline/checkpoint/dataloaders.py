"""Detect DataLoaders and streams that would read differently in a resumed run, so that a warning can be given."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from syncline.data import DistributedSampler
from syncline.words import format_count

_ENOUGH_STEPS = 3
"""Number of steps without movement that trigger the warning; a stream may take several batches from one block."""


def sampler_of(one: Any) -> DistributedSampler | None:
    """Return the DistributedSampler: `one` itself, or the one inside a loader; None if there is none."""
    for sampler in (
        one,
        getattr(one, "sampler", None),
        getattr(getattr(one, "batch_sampler", None), "sampler", None),
    ):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


class Places:
    """Positions of streams, watched from step to step until each has moved once.

    The workers of a DataLoader read copies of a stream, so the position of the saved stream never changes.

    Args:
        named: the saved objects, by name.

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
            or (name == "sampler" and not isinstance(one, DataLoader) and sampler_of(one) is None)
        }
        self._last: dict[str, Any] = {}
        self._num_equal = dict.fromkeys(self._watched, 0)
        self.standing: list[str] = []
        """The names of the streams that did not move in several steps."""

    def step_ended(self) -> None:
        """Compare the positions with those of the previous step; call this after each step."""
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


class ResumeRemarks:
    """The texts of warnings about streams and DataLoaders that would differ in a resumed run, each given once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        """The names of streams that were reported."""
        self._has_searched = False
        """Whether the DataLoaders of this process were searched for."""

    def on(self, named: Mapping[str, Any], standing: Sequence[str]) -> list[str]:
        """Return the new warnings; the first call takes some ten milliseconds.

        Args:
            named: the saved objects, by name.
            standing: the names of streams that do not move; see `Places`.
        """
        texts = [
            f"the position of {name} ({type(named[name]).__name__}) has not changed in {_ENOUGH_STEPS} steps, so a "
            "resumed run would read the same samples again. If the workers of a DataLoader read the stream, they read "
            "copies of it: use num_workers=0, or torchdata's StatefulDataLoader, sl.TrainState(sampler=loader)"
            for name in standing
            if name not in self._reported
        ]
        self._reported.update(standing)
        if not self._has_searched:
            self._has_searched = True
            texts += _remarks_on_loaders(named)
        return texts


def _remarks_on_loaders(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each DataLoader of this process that makes a resumed run draw other random numbers.

    This searches all objects of the process once.
    """
    names = {id(one): name for name, one in named.items()}
    for loader in _all_loaders():
        if getattr(loader, "generator", None) is not None:
            continue
        stream = names.get(id(loader.dataset))
        if loader.persistent_workers:
            when = "once per run, because of persistent_workers=True"
        elif stream is not None and isinstance(loader.dataset, IterableDataset):
            when = f"whenever it begins to read {stream}"
        elif id(loader) in names and sampler_of(loader) is None:
            when = "whenever it begins"
        else:
            continue  # its epochs draw the same numbers, or the sampler resets the generators
        what = f"{type(loader.dataset).__name__} ({format_count(loader.num_workers, 'worker')})"
        yield (
            f"a DataLoader of {what} draws from torch's global generator {when}. A resumed run draws one number more, "
            "so that later random numbers differ, such as dropout masks: give the DataLoader a generator of its own, "
            "generator=torch.Generator()"
        )


def _all_loaders() -> list[DataLoader[Any]]:
    """Return every DataLoader of this process, found through the references from objects to their classes."""
    kinds: list[type] = [DataLoader]
    for kind in kinds:  # the list grows during the loop
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
