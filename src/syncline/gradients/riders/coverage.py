"""The parts of a replica, and the schedule by which they are compared.

A replica is a list of leaves: tensors and integers. They are divided into slices, and each step compares one slice, so
that the whole replica has been compared after a fixed number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline.optimizers.contents import parameters_of

__all__ = ["Coverage", "Leaf", "Piece", "optimizer_leaves_of", "parameter_leaves", "rotation", "spread"]


_OVERHEAD_BYTES = 1 << 14
"""Fixed cost of hashing one more tensor of any size, as the number of bytes that take as long to hash."""

_LEAST_BYTES = 1 << 18
"""Least cost of a slice. If there is less to compare per slice, there are fewer slices."""

_ALIGNMENT_NUMEL = 64
"""Tensors are cut at multiples of this number of elements, so that each piece but the last consists of whole words."""


class Piece(NamedTuple):
    """A range of elements of one tensor, in memory order."""

    leaf: int
    """Index of the tensor."""
    start: int
    stop: int


def rotation(sizes: Sequence[tuple[int, int]], num_slices: int) -> list[tuple[Piece, ...]]:
    """Divide tensors among slices of about the same cost, in order; large tensors are cut.

    Args:
        sizes: (numel, itemsize) of each tensor. A tensor without elements is one piece, too.
        num_slices: the number of slices; some may be empty.

    Example:
        >>> [[tuple(piece) for piece in pieces] for pieces in rotation([(10_000, 4), (3, 8)], 2)]
        [[(0, 0, 5056)], [(0, 5056, 10000), (1, 0, 3)]]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    budget_bytes = max(1, -(-total_bytes // num_slices))
    slices: list[list[Piece]] = [[] for _ in range(num_slices)]
    at = 0
    for leaf, (numel, itemsize) in enumerate(sizes):
        index = min(at // budget_bytes, num_slices - 1)
        begins = at + _OVERHEAD_BYTES
        start = 0
        while start < numel or not numel:
            left_bytes = (index + 1) * budget_bytes - begins
            stop = numel
            if index < num_slices - 1 and left_bytes < numel * itemsize:
                stop = max(start, -(-left_bytes // (itemsize * _ALIGNMENT_NUMEL)) * _ALIGNMENT_NUMEL)
                stop = min(stop, numel)
            if stop > start or not numel:
                slices[index].append(Piece(leaf, start, stop))
                start = stop
            index += 1
            if not numel:
                break
        at = begins + numel * itemsize
    return [tuple(pieces) for pieces in slices]


def spread(sizes: Sequence[tuple[int, int]], num_turns: int) -> list[tuple[Piece, ...]]:
    """Divide tensors among turns, as `rotation` does; if there is little data, some turns are empty, evenly spread.

    Example:
        >>> [len(pieces) for pieces in spread([(50_000, 4), (50_000, 4)], 5)]
        [1, 0, 1, 0, 0]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    num_slices = max(1, min(num_turns, -(-total_bytes // _LEAST_BYTES)))
    turns: list[tuple[Piece, ...]] = [()] * num_turns
    for index, pieces in enumerate(rotation(sizes, num_slices)):
        turns[index * num_turns // num_slices] = pieces
    return turns


class Leaf(NamedTuple):
    """One tensor or integer of the replica, and the path at which it is looked up when its turn comes."""

    name: str
    root: Any
    """A parameter, or a container of the leaf. A leaf that may be replaced is looked up in its container each time."""
    keys: tuple[Any, ...] = ()
    """The path from the root: keys of dicts, indices of lists, attributes of tensors that consist of other tensors."""
    has_agreed_strides: bool = False
    """Whether the ranks have agreed on the strides, so that the tensor can be read in memory order."""

    def value(self) -> Any:
        """Return the present value; None if it no longer exists."""
        found = self.root
        for key in self.keys:
            # It is nearly always a dict, and isinstance(found, Mapping) takes as long as everything else here.
            found = found.get(key) if isinstance(found, dict) else _child(found, key)
        return found if isinstance(found, Tensor | int) else None

    def write(self, value: int) -> None:
        """Replace an integer; tuples that contain it are rebuilt."""
        holders = [self.root]
        for key in self.keys[:-1]:
            holders.append(_child(holders[-1], key))
        new: Any = value
        for holder, key in zip(reversed(holders), reversed(self.keys), strict=True):
            if not isinstance(holder, tuple):
                holder[key] = new
                return
            items = [*holder[:key], new, *holder[key + 1 :]]
            new = type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)


def _child(holder: Any, key: Any) -> Any:
    if isinstance(holder, Mapping):
        # An optimizer's state is a defaultdict, in which holder[key] would create an entry.
        return holder.get(key)
    if isinstance(holder, Tensor):
        return getattr(holder, key, None)
    if isinstance(holder, list | tuple) and key < len(holder):
        return holder[key]
    return None


def _walk(tree: Any, keys: tuple[Any, ...], name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name and the path of each tensor and integer in a tree."""
    if isinstance(tree, Tensor):
        if hasattr(tree, "__tensor_flatten__"):
            # A DTensor holds a different shard on each rank.
            if not hasattr(tree, "device_mesh"):
                for inner in tree.__tensor_flatten__()[0]:
                    yield from _walk(getattr(tree, inner), (*keys, inner), f"{name}.{inner}")
        elif _has_own_memory(tree):
            yield name, keys
    elif isinstance(tree, int):
        yield name, keys
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _walk(tree[key], (*keys, key), f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _walk(item, (*keys, index), f"{name}[{index}]")


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether the values can be read from the tensor's own memory.

    A subclass with its own `__torch_dispatch__` may have no memory, because it handles every operation itself.
    """
    is_ordinary = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(tensor)
    return is_ordinary and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def parameter_leaves(named: Sequence[tuple[str, Tensor]]) -> list[Leaf]:
    """Return the leaves of parameters or buffers that the ranks have agreed on."""
    return [
        Leaf(path, parameter, keys, has_agreed_strides=True)
        for name, parameter in named
        for path, keys in _walk(parameter, (), name)
    ]


def optimizer_leaves_of(optimizers: Sequence[Optimizer], own: set[int]) -> list[Leaf]:
    """Return the leaves of optimizers' state: tensors and integers, kept for a parameter or for the optimizer itself.

    Floats are left out, because the floats that known optimizers keep (the last loss of LBFGS) differ between ranks.

    Args:
        optimizers: the optimizers.
        own: ids of the parameters that are kept equal; state of other parameters is left out.
    """
    leaves = []
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer {number} ({type(optimizer).__name__}), state"
        parameters = parameters_of(optimizer)
        places = {id(parameter): index for index, parameter in enumerate(parameters)}
        for key in [*parameters, *(key for key in optimizer.state if not isinstance(key, Tensor))]:
            is_parameter = isinstance(key, Tensor)
            if (is_parameter and id(key) not in own) or key not in optimizer.state:
                continue
            name = f"{prefix}[{places[id(key)] if is_parameter else repr(key)}]"
            leaves += [
                Leaf(path, optimizer.state, keys) for path, keys in _walk(optimizer.state[key], (key,), name)
            ]
    return leaves


class Coverage:
    """Leaves divided into slices, where the step number alone determines which slice has its turn.

    Ranks may list their leaves at different times. So nothing is counted here, and the division depends only on names
    and sizes.

    Args:
        leaves: the leaves; the same on all ranks.
        num_slices: the number of slices, and so of steps until every leaf has had its turn.
        agreed_at: the step at which all ranks last agreed on the leaves; None if unknown.
    """

    def __init__(self, leaves: Sequence[Leaf], num_slices: int, agreed_at: int | None) -> None:
        self.leaves = leaves
        self._forms = _forms(leaves)
        self._slices = spread([form[1:] for form in self._forms], num_slices)
        self._agreed_at = [agreed_at] * num_slices

    def found_again(self, leaves: Sequence[Leaf]) -> Coverage:
        """Return the coverage of the leaves as they are now: this object if names and sizes have not changed."""
        if _forms(leaves) == self._forms:
            self.leaves = leaves
            return self
        found = Coverage(leaves, len(self._slices), self.all_agreed_at)
        before = {leaf.name: agreed for leaf, agreed in zip(self.leaves, self._agreed_by_leaf(), strict=True)}
        for index, pieces in enumerate(found._slices):
            known = [leaves[piece.leaf].name for piece in pieces if leaves[piece.leaf].name in before]
            if known:
                found._agreed_at[index] = _earliest(before[name] for name in known)
        return found

    def _agreed_by_leaf(self) -> list[int | None]:
        found: list[list[int | None]] = [[] for _ in self.leaves]
        for agreed, pieces in zip(self._agreed_at, self._slices, strict=True):
            for piece in pieces:
                found[piece.leaf].append(agreed)
        return [_earliest(agreed) for agreed in found]

    def pieces(self, steps: range) -> list[Piece]:
        """Return the pieces whose turn it is in these steps."""
        return [piece for index in self._indices(steps) for piece in self._slices[index]]

    def all_agreed(self, at: int | None) -> None:
        """Record that all leaves were equal on all ranks at a step; None if that is no longer known."""
        self._agreed_at = [at] * len(self._slices)

    def agreed(self, steps: range, at: int) -> None:
        """Record that the slices of these steps were equal on all ranks at step `at`."""
        for index in self._indices(steps):
            self._agreed_at[index] = at

    def _indices(self, steps: range) -> list[int]:
        return sorted({step % len(self._slices) for step in steps[: len(self._slices)]})

    def agreed_at(self, leaf: int) -> int | None:
        """Return the last step at which all ranks agreed on every piece of a leaf; None if unknown."""
        return self._agreed_by_leaf()[leaf]

    @property
    def all_agreed_at(self) -> int | None:
        """The last step at which all ranks agreed on every leaf; None if unknown."""
        return _earliest(
            agreed for agreed, pieces in zip(self._agreed_at, self._slices, strict=True) if pieces
        )


def _earliest(steps: Iterable[int | None]) -> int | None:
    known = list(steps)
    return None if None in known or not known else min(step for step in known if step is not None)


def _forms(leaves: Sequence[Leaf]) -> list[tuple[str, int, int]]:
    forms = []
    for leaf in leaves:
        value = leaf.value()
        is_tensor = isinstance(value, Tensor)
        forms.append((leaf.name, value.numel() if is_tensor else 0, value.element_size() if is_tensor else 1))
    return forms
