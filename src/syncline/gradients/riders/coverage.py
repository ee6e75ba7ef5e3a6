"""What a replica consists of, one tensor or number after the other, and which of it has its turn in which step.

Which part of a replica is looked at in which step, so that all of it has had its turn after so many steps.
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
"""What looking at one more tensor costs, however small it is: about as much as so many of its bytes."""

_LEAST_BYTES = 1 << 18
"""A slice of less is not worth the look: then there are fewer of them."""

_ALIGNMENT_NUMEL = 64
"""Tensors are cut at multiples of this, so that each piece but the last is made of whole words."""


class Piece(NamedTuple):
    """Some elements of one tensor, in the order in which they lie in memory."""

    leaf: int
    """Which tensor."""
    start: int
    stop: int


def rotation(sizes: Sequence[tuple[int, int]], num_slices: int) -> list[tuple[Piece, ...]]:
    """Deal tensors out to slices of about the same cost, in order; large ones are cut.

    Args:
        sizes: (numel, itemsize) of each tensor. One without elements is a piece all the same.
        num_slices: how many; some may be empty.

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
    """The same for a number of turns; where there is little, some turns, evenly spread, have nothing.

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
    """One tensor or integer of the replica, and where it is to be found when its turn comes."""

    name: str
    root: Any
    """A parameter; or what has it inside, for what may be replaced is looked up."""
    keys: tuple[Any, ...] = ()
    """The way from there: keys of dicts, places in lists, attributes of tensors that are made of others."""
    has_agreed_strides: bool = False
    """Whether ranks have agreed on its strides, so that it can be read as it lies in memory."""

    def value(self) -> Any:
        """What it is now; None where it is gone."""
        found = self.root
        for key in self.keys:
            # Nearly always a dict: asking for Mapping takes as long as all the rest.
            found = found.get(key) if isinstance(found, dict) else _child(found, key)
        return found if isinstance(found, Tensor | int) else None

    def write(self, value: int) -> None:
        """Replace an integer; tuples around it are made anew."""
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
        return holder.get(
            key
        )  # an optimizer's state is a defaultdict: asking it otherwise would make an entry
    if isinstance(holder, Tensor):
        return getattr(holder, key, None)
    if isinstance(holder, list | tuple) and key < len(holder):
        return holder[key]
    return None


def _walk(tree: Any, keys: tuple[Any, ...], name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names and ways of the tensors and integers in a tree."""
    if isinstance(tree, Tensor):
        if hasattr(tree, "__tensor_flatten__"):
            if not hasattr(tree, "device_mesh"):  # a DTensor is a rank's part
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
    """Whether values can be read as they lie there; not of a subclass that may have none, for it does all by itself."""
    is_ordinary = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(tensor)
    return is_ordinary and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def parameter_leaves(named: Sequence[tuple[str, Tensor]]) -> list[Leaf]:
    """Of parameters or buffers that ranks have agreed on."""
    return [
        Leaf(path, parameter, keys, has_agreed_strides=True)
        for name, parameter in named
        for path, keys in _walk(parameter, (), name)
    ]


def optimizer_leaves_of(optimizers: Sequence[Optimizer], own: set[int]) -> list[Leaf]:
    """Of optimizers' state: tensors and integers, of their own parameters and of what belongs to none.

    Floats are left out: those that are known of optimizers (LBFGS's last loss) are a rank's own.

    Args:
        optimizers: whose.
        own: ids of the parameters that are kept equal; what is remembered of others is left out.
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
    """Some leaves, dealt out to slices whose turns follow from the step alone.

    Which leaves there are may be found out at different times on different ranks; so nothing is counted here, and what
    is dealt out depends on names and sizes alone.

    Args:
        leaves: the same on all ranks.
        num_slices: in which all have had their turn.
        agreed_at: the step at which all ranks agreed on them last; None where that is not known.
    """

    def __init__(self, leaves: Sequence[Leaf], num_slices: int, agreed_at: int | None) -> None:
        self.leaves = leaves
        self._forms = _forms(leaves)
        self._slices = spread([form[1:] for form in self._forms], num_slices)
        self._agreed_at = [agreed_at] * num_slices

    def found_again(self, leaves: Sequence[Leaf]) -> Coverage:
        """Of the leaves as they are now: the same where they are cut alike."""
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
        """What has its turn in these steps."""
        return [piece for index in self._indices(steps) for piece in self._slices[index]]

    def all_agreed(self, at: int | None) -> None:
        """All ranks had the same in all of it; None: that is not known any more."""
        self._agreed_at = [at] * len(self._slices)

    def agreed(self, steps: range, at: int) -> None:
        """All ranks had the same in what has its turn in these steps."""
        for index in self._indices(steps):
            self._agreed_at[index] = at

    def _indices(self, steps: range) -> list[int]:
        return sorted({step % len(self._slices) for step in steps[: len(self._slices)]})

    def agreed_at(self, leaf: int) -> int | None:
        """The step at which all ranks agreed on all of a leaf."""
        return self._agreed_by_leaf()[leaf]

    @property
    def all_agreed_at(self) -> int | None:
        """The step at which all ranks agreed on all of it."""
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
