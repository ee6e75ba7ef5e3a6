"""The leaves of a replica: its tensors and integers, by name. A leaf's value is looked up when it is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline.optimizers.contents import parameters_of


class Leaf(NamedTuple):
    """The name of one tensor or integer of the replica, and the path on which its value is looked up."""

    name: str
    root: Any
    """The object at which the path begins: a parameter, or a container in which the value may be replaced."""
    keys: tuple[Any, ...] = ()
    """The path from the root: keys of dicts, indices of lists, and attributes of tensors that wrap other tensors."""
    has_agreed_strides: bool = False
    """Whether the ranks have agreed on the strides, so that the tensor can be read in memory order."""

    def value(self) -> Any:
        """Return the present value of the leaf. Return None if it no longer exists."""
        found = self.root
        for key in self.keys:
            # `found` is nearly always a dict, and isinstance(found, Mapping) takes as long as the rest of this loop.
            found = found.get(key) if isinstance(found, dict) else _child(found, key)
        return found if isinstance(found, Tensor | int) else None

    def write(self, value: int) -> None:
        """Set this leaf, which is an integer, to `value`. Tuples that contain the leaf are created again."""
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
    """Yield the name and the path of each tensor and integer in nested containers.

    Args:
        tree: a tensor, an integer, or nested dicts, lists and tuples.
        keys: the path of `tree` itself.
        name: the name of `tree` itself.
    """
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
    """Return whether a tensor's values can be read from its own memory.

    If its class overrides `__torch_dispatch__`, the tensor may have no memory, because the class handles every
    operation.
    """
    is_ordinary = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(tensor)
    return is_ordinary and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def parameter_leaves(named: Sequence[tuple[str, Tensor]]) -> list[Leaf]:
    """Return the leaves of tensors on whose names, shapes and strides the ranks have agreed.

    Args:
        named: parameters or buffers with their names.
    """
    return [
        Leaf(path, parameter, keys, has_agreed_strides=True)
        for name, parameter in named
        for path, keys in _walk(parameter, (), name)
    ]


def optimizer_leaves_of(optimizers: Sequence[Optimizer], own: set[int]) -> list[Leaf]:
    """Return the leaves of optimizers' state: the tensors and integers that an optimizer stores.

    Floats are left out, because the only floats that known optimizers store (the last loss of LBFGS) differ between
    ranks.

    Args:
        optimizers: the optimizers.
        own: the ids of the parameters that must be equal on all ranks. The state of other parameters is left out.
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
