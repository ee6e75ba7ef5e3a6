"""Detect DataLoaders and streams that a resumed run would read differently, and compose the warnings about them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from syncline.data import DistributedSampler
from syncline.equality.fingerprint import fingerprints
from syncline.trees import leaves
from syncline.words import format_count

_ENOUGH_STEPS = 3
"""The number of steps in which a stream must stay at one position before a warning is given.

It is more than 1, because a stream can read a block of several batches at once.
"""


def sampler_of(one: Any) -> DistributedSampler | None:
    """Return the DistributedSampler of an object: the object itself, or the sampler in a loader; None if absent."""
    inner = getattr(getattr(one, "batch_sampler", None), "sampler", None)
    samplers = (one, getattr(one, "sampler", None), inner)
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


def is_node_loader(one: Any) -> bool:
    """Return whether an object is a `torchdata.nodes.Loader`."""
    nodes = sys.modules.get("torchdata.nodes")  # absent unless the program has imported it
    return nodes is not None and isinstance(one, nodes.Loader)


def check_node_loader(name: str, one: Any) -> None:
    """Raise an error if `one` is a `torchdata.nodes.Loader` that reads by an `sl.DistributedSampler`.

    Such a loader saves the committed position of the sampler, and nothing commits.
    """
    nodes = [one] if is_node_loader(one) else []
    for node in nodes:  # the list grows during the loop
        for value in vars(node).values():
            parts = list(value.values()) if isinstance(value, dict) else [value]
            if any(isinstance(part, DistributedSampler) for part in parts):
                raise ValueError(
                    f"{name} is a torchdata.nodes.Loader with an sl.DistributedSampler, whose position it does not "
                    "save, so a resumed run would start the epoch again: give SamplerWrapper torch's sampler, "
                    "torch.utils.data.DistributedSampler(...), or use torchdata's StatefulDataLoader"
                )
            nodes += [part for part in parts if isinstance(part, sys.modules["torchdata.nodes"].BaseNode)]


def load_again(one: Any, state: Any) -> None:
    """Make a `torchdata.nodes.Loader` that has just loaded `state` begin its next iteration there.

    torchdata 0.11 ignores `load_state_dict` if `state_dict` was called before, because `state_dict` begins an iteration
    that the next `iter` returns. Nothing is done for other objects, or for a Loader that has not begun any iteration.
    """
    if not is_node_loader(one):
        return
    try:
        has_begun = one._it is not None
    except AttributeError:  # another version of torchdata
        has_begun = True
    if has_begun:
        iter(one)  # may be the iteration that state_dict() began
        iter(one)  # begins at `state`, so state_dict() returns it from now on
        one.load_state_dict(state)  # for the next `iter`


class Places:
    """A detector of streams whose position does not change from step to step.

    The workers of a DataLoader read copies of a stream, so the position of the saved stream itself never changes.

    Args:
        named: the saved objects, by name.

    Examples:
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
        self._places: dict[str, list[list[Any]]] = {name: [] for name in self._watched}
        """The fingerprints of each watched stream's positions, one for each step, by the name of the stream."""
        self.standing: list[str] = []
        """The names of the streams whose position did not change in `_ENOUGH_STEPS` steps."""

    def step_ended(self) -> None:
        """Record the position of each watched stream, and detect streams that do not move. Call it after each step."""
        for name, one in list(self._watched.items()):
            places = self._places[name]
            places.append(_fingerprint_of_state(one.state_dict()))
            has_moved = places[0] != places[-1]
            if has_moved or len(places) > _ENOUGH_STEPS:
                del self._watched[name], self._places[name]
                self.standing += [] if has_moved else [name]


class ResumeRemarks:
    """A source of warnings about streams and DataLoaders that a resumed run would read differently.

    Each warning is returned once.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()
        """The names of the streams about which a warning was returned."""
        self._has_searched = False
        """Whether this process was searched for DataLoaders."""

    def on(self, named: Mapping[str, Any], standing: Sequence[str]) -> list[str]:
        """Return the texts of the warnings that were not returned before. The first call takes about ten milliseconds.

        Args:
            named: the saved objects, by name.
            standing: the names of the streams whose position does not change; see `Places.standing`.
        """
        texts = [
            f"the position of {name} ({type(named[name]).__name__}) has not changed in {_ENOUGH_STEPS} steps, so a "
            "resumed run would read the same samples again. The workers of a DataLoader read copies of a stream, so "
            "the stream itself does not advance: use num_workers=0, or use torchdata's StatefulDataLoader and save it, "
            "sl.TrainState(sampler=loader)"
            for name in standing
            if name not in self._reported
        ]
        self._reported.update(standing)
        if not self._has_searched:
            self._has_searched = True
            texts += _remarks_on_loaders(named)
        return texts


def _remarks_on_loaders(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning about each DataLoader because of which a resumed run draws an extra random number."""
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
            when = "whenever an iteration begins"
        else:
            continue  # a resumed run draws the same numbers, or the sampler resets the generators
        what = f"{type(loader.dataset).__name__} ({format_count(loader.num_workers, 'worker')})"
        yield (
            f"a DataLoader of {what} draws from torch's global generator {when}. A resumed run draws one number more, "
            "so its later random numbers (dropout masks, for example) differ: give the DataLoader a generator of its "
            "own, generator=torch.Generator()"
        )


def _all_loaders() -> list[DataLoader[Any]]:
    """Return every DataLoader of this process, including instances of subclasses.

    The garbage collector lists the objects that refer to these classes. An instance refers to its class.
    """
    kinds: list[type] = [DataLoader]
    for kind in kinds:  # the list grows during the loop
        kinds += kind.__subclasses__()
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def _fingerprint_of_state(state: Any) -> list[Any]:
    """Return a fingerprint of a state as a list. Equal states have equal fingerprints."""
    named = list(leaves(state))
    return [*(name for name, _ in named), *fingerprints([leaf for _, leaf in named])]
