"""Capture this rank's state: JSON values, tensors on the CPU, and checksums of both."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from syncline.checkpoint.encoding import encode, tensors_in
from syncline.checkpoint.objects import is_wrapped
from syncline.checkpoint.tensor_file import checksum, memory_of
from syncline.checkpoint.train_state import TrainState
from syncline.sharded.part import has_sharded_state
from syncline.transport.agreement import describe_tensors

__all__ = ["Parts", "entry_of"]


def entry_of(name: str) -> str:
    """Return the name of a JSON value in digests, which cannot be mistaken for a tensor's name."""
    return f"entry {name}"


class Parts:
    """The state of this rank, split into JSON values and tensors.

    Args:
        state: the state to capture.
        copies: buffers that tensors are copied into, by name; missing ones are added. None: tensors are not copied,
            so the caller must not change them while they are read.

    Raises:
        TypeError, ValueError: a value cannot be stored, or two tensors would have the same name; the message names
            the value.
    """

    def __init__(self, state: TrainState, copies: dict[str, Tensor] | None) -> None:
        self.trees: dict[str, Any] = {}
        """The JSON values, by name of the object."""
        self.classes = {
            name: type(one).__name__ for name, one in state.named.items() if not isinstance(one, nn.Module)
        }
        """The class names of all objects except modules, because a module may be wrapped differently when loaded."""
        self.forms_of_modules: list[str] = []
        """The type and shape of each module tensor, one line per tensor; they must be equal on all ranks."""
        self.sharded = [name for name, one in state.named.items() if has_sharded_state(one)]
        """The names of sharded objects."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors of all objects, on the CPU, by name."""
        for name, one in state._shard_state_dict().items():
            self.trees[name], tensors = encode(one, name)
            taken = self.tensors.keys() & tensors.keys()
            if taken:
                raise ValueError(
                    f"{min(taken)} of {name} is also the name of another tensor: name it without the dot"
                )
            for key, tensor in tensors.items():
                self.tensors[key] = (
                    tensor.cpu().contiguous() if copies is None else _copied(tensor, key, copies)
                )
            if isinstance(state.named.get(name), nn.Module):
                tree = self.trees[name]
                kept = dict.fromkeys(tensors_in(tree["module"] if is_wrapped(tree) else tree))
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
        """A digest of each tensor and of each JSON value, by name; equal digests mean equal content."""
        found = {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {self.checksums[name]}"
            for name, tensor in self.tensors.items()
        }
        return found | {
            entry_of(name): checksum(json.dumps(tree).encode()) for name, tree in self.trees.items()
        }

    def chosen(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the named tensors, in their original order."""
        return {name: tensor for name, tensor in self.tensors.items() if name in names}


def _copied(tensor: Tensor, name: str, copies: dict[str, Tensor]) -> Tensor:
    copy = copies.get(name)
    if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        copy = copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)
