"""The content of a save: the state that a rank writes, and the state that a rank reads back.

The state is split into tensors and JSON values. This module also composes the warnings about a loaded save: some
objects were not saved, the state of other ranks was not loaded, or an object has another class than when it was saved.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.checkpoint.directory import MANIFEST, SHARED_FILE, own_file, read_manifest
from syncline.checkpoint.encoding import decode, encode, tensors_in
from syncline.checkpoint.files import Files, checksum, malformed_is_corrupt, memory_of, read_files
from syncline.checkpoint.objects import (
    check_rng_state,
    copies,
    is_wrapped,
    unwrapped,
    without_synchronization,
)
from syncline.checkpoint.train_state import TrainState
from syncline.compression.exchange import with_mean_residuals
from syncline.data import DistributedSampler, place_to_resume
from syncline.sharded.part import has_sharded_state, join_parts
from syncline.transport.agreement import describe_tensors
from syncline.words import describe_ranks, format_count

# ---------------------------------------------------------------------- to write


def entry_of(name: str) -> str:
    """Return the key of an object's JSON value in `Parts.digests`. No tensor has such a key."""
    return f"entry {name}"


class Parts:
    """The state of this rank, split into JSON values and tensors.

    Args:
        state: the state to save.
        copies: a dict with the tensor copies of the previous save, by tensor name. The memory of these copies is used
            again. The dict is updated: afterwards it has the copies of this state. Pass None to copy no tensor; the
            caller must then leave the tensors unchanged until they are written.

    Raises:
        TypeError, ValueError: a value cannot be stored, or two tensors would have the same name. The message names
            the value.
    """

    def __init__(self, state: TrainState, copies: dict[str, Tensor] | None) -> None:
        self.trees: dict[str, Any] = {}
        """The JSON value of each object, by the name of the object."""
        self.classes = {
            name: type(one).__name__ for name, one in state.named.items() if not isinstance(one, nn.Module)
        }
        """The class name of each object. Modules are left out, because the loading run may wrap them differently."""
        self.forms_of_modules: list[str] = []
        """Lines of text, one with the dtype and shape of each module tensor. They must be equal on all ranks."""
        self.sharded = [name for name, one in state.named.items() if has_sharded_state(one)]
        """The names of the objects of which each rank saves only its shard."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors of all objects, on the CPU, by name."""
        for name, one in state._shard_state_dict().items():
            self.trees[name], tensors = encode(one, name)
            taken = self.tensors.keys() & tensors.keys()
            if taken:
                raise ValueError(
                    f"two tensors of this sl.TrainState would be saved as {min(taken)}, one of them in {name}. Their "
                    "names would be the same, because the name of an object has a dot: give each object a name without "
                    "a dot"
                )
            self.tensors |= {
                key: tensor.cpu().contiguous() if copies is None else _copied(tensor, key, copies)
                for key, tensor in tensors.items()
            }
            if isinstance(state.named.get(name), nn.Module):
                kept = dict.fromkeys(tensors_in(without_synchronization(self.trees[name])))
                self.forms_of_modules += describe_tensors(
                    ((key, self.tensors[key]) for key in kept), kind="saved", layout=False
                )
        if copies is not None:
            for gone in copies.keys() - self.tensors.keys():
                del copies[gone]

    @cached_property
    def checksums(self) -> dict[str, str]:
        """The checksum of each tensor, by name."""
        return {name: checksum(memory_of(tensor)) for name, tensor in self.tensors.items()}

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of tensors, by name, and of JSON values, by `entry_of`. Equal digests mean equal content."""
        found = {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {self.checksums[name]}"
            for name, tensor in self.tensors.items()
        }
        return found | {
            entry_of(name): checksum(json.dumps(tree).encode()) for name, tree in self.trees.items()
        }


def _copied(tensor: Tensor, name: str, copies: dict[str, Tensor]) -> Tensor:
    copy = copies.get(name)
    if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        copy = copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor)


# ---------------------------------------------------------------------- to read


class SaveContent:
    """The part of a save that this rank needs, read from the files and verified. Its tensors are mapped into memory.

    Args:
        files: the file system.
        path: the directory of the save.
        rank: the number of this rank. This rank loads the state that the rank with the same number saved. If no rank
            with this number took part in the save, it loads the state that rank 0 saved.
        num_ranks: the number of ranks that load.

    Raises:
        CheckpointCorrupt: the save is damaged.
        OSError: the save could not be read.
    """

    def __init__(self, files: Files, path: str, *, rank: int, num_ranks: int) -> None:
        self.manifest = manifest = read_manifest(files, path)
        self.is_new_rank = rank >= manifest.num_ranks
        """Whether no rank with this number took part in the save."""
        self._place = place = 0 if self.is_new_rank else rank
        self._are_others = num_ranks != manifest.num_ranks
        self._trees = [ChainMap(own, manifest.shared) for own in manifest.ranks]
        self._manifest_path = f"{path}/{MANIFEST}"
        wanted = {
            own_file(other): {*self._needed_of_others(manifest.shared), *self._needed_of_others(own)}
            for other, own in enumerate(manifest.ranks)
        }
        needed = {
            name: stored.tensors
            if name in (SHARED_FILE, own_file(place))
            else wanted[name] & stored.tensors.keys()
            for name, stored in manifest.files.items()
        }
        found = read_files(files, path, manifest.files, needed)
        shared = found.get(SHARED_FILE, {})
        self._shared = shared.keys()
        """The names of the tensors that were equal on all ranks."""
        self._tensors = [
            ChainMap(found.get(own_file(other), {}), shared) for other in range(manifest.num_ranks)
        ]

    def _needed_of_others(self, trees: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of the tensors that this rank needs from the state of another rank.

        Args:
            trees: the JSON values of the other rank, or those that are equal on all ranks, by name of the object.
        """
        sharded = set(self.manifest.sharded)
        for name, tree in trees.items():
            if name in sharded:
                yield from tensors_in(tree)
            elif self._are_others and is_wrapped(tree):
                yield from tensors_in(tree["synchronization"])

    @property
    def names(self) -> list[str]:
        """The names of the saved objects."""
        return list(self._trees[self._place])

    def own_names(self, named: Collection[str]) -> list[str]:
        """Return a text for each object in `named` that was saved separately by each rank.

        The text is the name of the object. If only some tensors of the object differed between ranks, the text also
        says how many, and names the first. Shards and the positions of samplers are left out, because any number of
        ranks can load them.
        """
        names = []
        for name, tree in self._trees[0].items():
            if name not in named or name in self.manifest.sharded:
                continue
            is_own = name not in self.manifest.shared and not is_wrapped(tree)
            tensors = sorted(set(tensors_in(without_synchronization(tree))) - self._shared)
            if is_own:
                places = [self._place_to_resume(name, rank) for rank in range(self.manifest.num_ranks)]
                if places[0] is None or any(place != places[0] for place in places):
                    names.append(name)
            elif tensors:
                count = format_count(len(tensors), "tensor")
                names.append(f"{name} ({count}, {tensors[0]}{' among others' if len(tensors) > 1 else ''})")
        return names

    def decoded_for(self, named: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Return the saved states by name, in the form that `TrainState.load_state_dict` accepts.

        Args:
            named: the objects to load into, by name.
            strict: whether to return the states of all saved objects, not only of those in `named`.

        Raises:
            CheckpointCorrupt: the manifest has values that this version of Syncline does not know.
        """
        wanted = {"step", "rng", *(self.names if strict else named)}
        with malformed_is_corrupt(self._manifest_path):
            states = {name: self.decoded(name, named.get(name)) for name in self.names if name in wanted}
            check_rng_state(states["rng"])
        if self.is_new_rank:
            del states["rng"]  # a new rank must not repeat rank 0's random numbers
        return states

    def decoded(self, name: str, one: Any) -> Any:
        """Return the saved state of an object, with its shards joined, in a form that the object can load.

        Args:
            name: the name of the object.
            one: the object.
        """
        saved = list(zip(self._trees, self._tensors, strict=True))
        trees, tensors = saved[self._place]
        if name in self.manifest.sharded:
            found = join_parts([decode(trees[name], tensors) for trees, tensors in saved])
        elif isinstance(one, DistributedSampler) and (place := self._place_to_resume(name, self._place)):
            return place
        else:
            found = decode(trees[name], tensors)
        if is_wrapped(found):
            if self._are_others:
                of_all = [decode(trees[name]["synchronization"], tensors) for trees, tensors in saved]
                try:
                    found["synchronization"] = with_mean_residuals(found["synchronization"], of_all)
                except RuntimeError as error:  # the residuals have different shapes
                    raise ValueError(str(error)) from None
            found["synchronization"] = deepcopy(found["synchronization"])
        return found if copies(one) else deepcopy(found)

    def _place_to_resume(self, name: str, rank: int) -> Any:
        """Return the position at which the sampler `name` resumes on a rank; see `place_to_resume`.

        Returns None if the object is not a sampler.
        """
        places = []
        for tree in (self._trees[rank][name], self._trees[0][name]):
            place = None if any(tensors_in(tree)) else decode(tree, {})
            if not isinstance(place, dict) or not place.keys() >= {"epoch", "used", "num_samples"}:
                return None
            places.append(place)
        return place_to_resume(*places, rank=rank, num_ranks=self.manifest.num_ranks)

    def same_on_all(self, state: TrainState) -> dict[str, Any]:
        """Return the values in `state` that must be equal on all ranks after loading, by name of the object.

        These are the values of modules and optimizers, without shards and without entries that differed between the
        ranks when they were saved.
        """
        found: dict[str, Any] = {}
        for name, one in state.named.items():
            if isinstance(one, nn.Module):
                own = self._own_entries(name)
                if own is not None:
                    entries = unwrapped(one).state_dict().items()
                    found[name] = {key: value for key, value in entries if key not in own}
            elif isinstance(one, Optimizer) and not has_sharded_state(one):
                was_sharded = name in self.manifest.sharded  # if so, it was joined to one state for all ranks
                if was_sharded or self._own_entries(name) == set():
                    found[name] = one.state_dict()
        return found

    def _own_entries(self, name: str) -> set[str] | None:
        """Return the keys of those entries in an object's state that differed between the ranks when they were saved.

        Returns None if the save does not show which entries differed.
        """
        tree = without_synchronization(self.manifest.shared.get(name))
        if not isinstance(tree, dict):
            return None
        return {key for key, one in tree.items() if not self._shared >= set(tensors_in(one))}


def remarks(name: str, found: SaveContent, state: TrainState, num_ranks: int) -> Iterator[str]:
    """Yield the texts of the warnings about a loaded save. They are the same on all ranks.

    Args:
        name: the name of the save.
        found: the content of the save.
        state: the state into which the save was loaded.
        num_ranks: the number of ranks that have loaded it.
    """
    stays = [one for one in state.named if one not in found.names]
    if stays:
        has = ", ".join(one for one in found.names if one not in ("step", "rng"))
        yield f"{', '.join(stays)} {'is' if len(stays) == 1 else 'are'} unchanged: {name} has only {has}"

    before = found.manifest.num_ranks
    own = found.own_names(state.named) if before != num_ranks else []
    if own:
        if num_ranks > before:
            what = f"{describe_ranks(range(before, num_ranks))} loaded the state of rank 0"
        else:
            what = f"the state of {describe_ranks(range(num_ranks, before))} was not loaded"
        yield (
            f"{name} was saved by {format_count(before, 'rank')}, each with its own {', '.join(own)}, and there are "
            f"{num_ranks} ranks now: {what}"
        )

    # Another class may give the same keys another meaning. Modules are exempt: they may be wrapped differently.
    for key, one in state.named.items():
        now, then = type(one).__name__, found.manifest.classes.get(key)
        if then not in (now, None) and not isinstance(one, nn.Module):
            yield (
                f"{key} of {name} is the state of a {then}, and was loaded into a {now}. The {now} now has the saved "
                f"settings, and ignores the entries that it does not know. To continue the saved run, create a {then}"
            )
