"""A state of this rank, taken apart: what is not a tensor, tensors on the CPU, and checksums of both."""

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
    """By which something named is told from a tensor."""
    return f"entry {name}"


class Parts:
    """A state of this rank, taken apart.

    Args:
        state: whose.
        copies: memory to copy tensors to, by name, which is filled up as needed; None: they are only read while nobody
            writes them.

    Raises:
        TypeError, ValueError: something cannot be stored, or two tensors would have one name; its place is named.
    """

    def __init__(self, state: TrainState, copies: dict[str, Tensor] | None) -> None:
        self.trees: dict[str, Any] = {}
        """What is not a tensor, by what it was named."""
        self.classes = {
            name: type(one).__name__ for name, one in state.named.items() if not isinstance(one, nn.Module)
        }
        """The names of the classes of all but modules, which may be wrapped another time."""
        self.forms_of_modules: list[str] = []
        """What has to be the same on all ranks: of each tensor of a module its type and shape, a line each."""
        self.sharded = [name for name, one in state.named.items() if has_sharded_state(one)]
        """The names of what is sharded."""
        self.tensors: dict[str, Tensor] = {}
        """Those of all, on the CPU."""
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
        """Of the tensors."""
        return {name: checksum(memory_of(tensor)) for name, tensor in self.tensors.items()}

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of tensors and of what was named: equal where these are."""
        found = {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {self.checksums[name]}"
            for name, tensor in self.tensors.items()
        }
        return found | {
            entry_of(name): checksum(json.dumps(tree).encode()) for name, tree in self.trees.items()
        }

    def chosen(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some of the tensors, in their order."""
        return {name: tensor for name, tensor in self.tensors.items() if name in names}


def _copied(tensor: Tensor, name: str, copies: dict[str, Tensor]) -> Tensor:
    copy = copies.get(name)
    if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        copy = copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)
