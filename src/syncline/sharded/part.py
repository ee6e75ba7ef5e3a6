"""Parts of tensors, and functions that join the parts of all ranks into whole tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ATTRIBUTE = "_syncline_sharded_state"
"""The attribute of an optimizer that holds its `ShardedState`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorPart:
    """A part of a tensor, which consists of elements that are consecutive in memory.

    Elements are counted in memory order, which may differ from the order of the dimensions: the elements of a
    channels_last weight are counted channels last.
    """

    values: Tensor
    """The elements of the part, in memory order, of shape (numel of the part,)."""
    start: int
    """Index of the first element in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    order: tuple[int, ...]
    """The dimensions of the whole tensor, slowest first: `whole.permute(order).flatten()` is in memory order."""

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.values.numel()


class PartedTensor:
    """The parts of one tensor. The whole tensor is built only on request, so the object itself needs no extra memory.

    Args:
        parts: the parts, in any order. If several parts contain the same element, any of these parts may be used.

    Raises:
        ValueError: the parts do not belong to one tensor, or elements are missing.

    Examples:
        >>> def part(start, *values):
        ...     return TensorPart(values=torch.tensor(values), start=start, shape=(2, 2), order=(1, 0))
        >>> PartedTensor([part(3, 4), part(0, 1, 2, 3)]).whole()
        tensor([[1, 3],
                [2, 4]])
        >>> PartedTensor([part(3, 4), part(0, 1)])
        Traceback (most recent call last):
        ValueError: expected parts that contain all 4 elements of a tensor, but elements 1 to 2 are missing
    """

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        self._parts = sorted(parts, key=lambda part: (part.start, part.stop))
        first = self._parts[0]
        self.shape = torch.Size(first.shape)
        self.dtype = first.values.dtype
        self.device = first.values.device
        kinds = {(part.shape, part.order, part.values.dtype) for part in parts}
        if len(kinds) > 1:
            raise ValueError(
                "expected parts of one tensor, got parts of tensors with different shapes, orders of dimensions or "
                f"dtypes: {sorted(map(str, kinds))}"
            )
        numel, end = self.shape.numel(), 0
        for part in [*self._parts, None]:
            start = numel if part is None else part.start
            if start > end:
                raise ValueError(
                    f"expected parts that contain all {numel} elements of a tensor, but elements {end} to {start - 1} "
                    "are missing"
                )
            end = end if part is None else max(end, part.stop)

    def dim(self) -> int:
        """Return the number of dimensions of the whole tensor."""
        return len(self.shape)

    def whole(self) -> Tensor:
        """Return the whole tensor in new memory. Its strides follow `TensorPart.order`."""
        order = self._parts[0].order
        flat = torch.empty(self.shape.numel(), dtype=self.dtype, device=self.device)
        for part in self._parts:
            flat[part.start : part.stop] = part.values
        turned = flat.view([self.shape[dim] for dim in order])
        return turned.permute([order.index(dim) for dim in range(len(order))])

    def __deepcopy__(self, memo: object) -> Tensor:
        """Return the whole tensor, because parts are never copied to be parts."""
        return self.whole()


class ShardedState(ABC):
    """The state of an object, of which each rank has one shard. Saving and loading it needs no communication."""

    @abstractmethod
    def _shard_state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state. Each split tensor is given by a `TensorPart`. Nothing is sent."""

    @abstractmethod
    def _load_shards(self, state: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
        """Load this rank's shard from the joined state of all ranks. Nothing is sent.

        Args:
            state: the shards of all ranks, joined by `join_parts`. Tensors that were in parts are `PartedTensor`s.
                The object keeps no tensor of `state`.
            types: the dtype in which each parameter was saved, by the parameter's `id`.
        """


def attach_sharded_state(optimizer: Optimizer, state: ShardedState | None) -> None:
    """Record that `state` is the sharded state of `optimizer`, so that `sharded_state_of` finds it.

    With None, the optimizer has no sharded state any more.
    """
    setattr(optimizer, _ATTRIBUTE, state)


def sharded_state_of(one: object) -> ShardedState | None:
    """Return the sharded state of an object. Return None if every rank has the object's whole state.

    Examples:
        >>> sharded_state_of(torch.optim.SGD([torch.zeros(1)])) is None
        True
    """
    found = one if isinstance(one, ShardedState) else getattr(one, _ATTRIBUTE, None)
    return found if isinstance(found, ShardedState) else None


def has_sharded_state(one: object) -> bool:
    """Return whether each rank has only a shard of the object's state."""
    return sharded_state_of(one) is not None


def join_parts(states: Sequence[Any]) -> Any:
    """Join the states of all ranks into one state.

    Dicts are joined key by key. The `TensorPart`s of one tensor are joined into a `PartedTensor`. Any other value is
    taken from the first rank that has it.

    Args:
        states: the state of each rank, in rank order.

    Raises:
        ValueError: elements of a tensor are in no part, or the parts do not belong to one tensor. The message contains
            the path of the tensor in the state.

    Examples:
        >>> halves = [TensorPart(values=torch.ones(1), start=i, shape=(2,), order=(0,)) for i in range(2)]
        >>> joined = join_parts([{"step": 3, 0: {"momentum": halves[0]}}, {0: {"momentum": halves[1]}, 1: {}}])
        >>> whole_of(joined)
        {'step': 3, 0: {'momentum': tensor([1., 1.])}, 1: {}}
    """
    return _joined(states, "")


def _joined(states: Sequence[Any], place: str) -> Any:
    if isinstance(states[0], TensorPart):
        try:
            return PartedTensor([part for part in states if isinstance(part, TensorPart)])
        except ValueError as error:
            raise ValueError(f"{place[1:]}: {error}") from None
    if not isinstance(states[0], dict) or isinstance(states[0], Counter):
        return states[0]
    found: dict[Any, list[Any]] = {}
    for state in states:
        for key, value in state.items():
            found.setdefault(key, []).append(value)
    return {key: _joined(values, f"{place}.{key}") for key, values in found.items()}


def whole_of(state: Any) -> Any:
    """Return the state with each `PartedTensor` replaced by its whole tensor, also in dicts, lists and tuples."""
    if isinstance(state, PartedTensor):
        return state.whole()
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: whole_of(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(whole_of(value) for value in state)
    return state
