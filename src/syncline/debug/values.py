"""Fingerprints of the inputs and outputs of modules, and descriptions of the difference between two tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.equality.fingerprint import fingerprints
from syncline.gradients.usage import tensors_in
from syncline.trees import leaves

KEPT_BYTES = 1 << 28
"""The size limit for the copies of the inputs and outputs in one run. The copies show how much a later run differs."""


class Value(NamedTuple):
    """The fingerprint of one tensor or plain value at one moment."""

    name: str
    """The name of the value, or its position in a nested container; "" if the value is not in a container."""
    about: str
    """The shape and dtype of a tensor, or the type of a plain value."""
    bits: int
    """The fingerprint of the value; 0 if the value cannot be read."""
    has_nan: bool = False
    """Whether the value is a tensor that contains NaN."""


def values_of(tree: Any) -> tuple[Value, ...]:
    """Return the fingerprints of the tensors and plain values in a nested container. Other objects are ignored.

    Examples:
        >>> x, n = values_of((torch.zeros(2), {"n": 3}))
        >>> x.name, x.about, n.name, n.about
        ('[0]', '(2,) torch.float32', '[1].n', 'int')
    """
    return values_of_named(named_leaves(tree))


def values_of_named(named: Sequence[tuple[str, Any]]) -> tuple[Value, ...]:
    """Return the fingerprints of named tensors and plain values, in their order."""
    with torch.no_grad():
        bits = _bits_of([leaf for _, leaf in named])
        return tuple(
            Value(name, _about(leaf), one, _has_nan(leaf))
            for (name, leaf), one in zip(named, bits, strict=True)
        )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the tensors and plain values of a nested container, with their positions.

    Tensors inside dataclasses and inside mappings that are not dicts (such as a tokenizer's batch) are included.
    """
    found: list[tuple[str, Any]] = []
    for name, leaf in leaves(tree):
        if isinstance(leaf, Tensor | int | float | complex | str | bytes | bool | None):
            found.append((name, leaf))
        else:
            found += [(f"{name}#{index}", tensor) for index, tensor in enumerate(tensors_in(leaf))]
    return found


def _bits_of(values: Sequence[Any]) -> list[int]:
    if all(_is_ordinary(value) for value in values if isinstance(value, Tensor)):
        return fingerprints(values)
    return [_bits_of_special(value) for value in values]


def _is_ordinary(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    )


def _bits_of_special(value: Any) -> int:
    """Return the fingerprint of a value that may be a sparse tensor or a subclass; 0 if it cannot be read."""
    with contextlib.suppress(Exception):  # subclasses may raise any exception
        if isinstance(value, Tensor):
            value = value.detach() if value.layout == torch.strided else value.detach().to_dense()
        return fingerprints([value])[0]
    return 0


def _about(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _has_nan(value: Any) -> bool:
    if not isinstance(value, Tensor) or not _is_ordinary(value):
        return False
    return (value.is_floating_point() or value.is_complex()) and bool(torch.isnan(value.detach()).any())


# ---------------------------------------------------------------------- size of a difference


class Kept:
    """A store of copies of the inputs and outputs in one run. The key is an event and a position in this event.

    Args:
        limit_bytes: the maximum size of all copies together.
    """

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._left_bytes = limit_bytes
        self._tensors: dict[tuple[int, int], Tensor] = {}

    def keep(self, event: int, tree: Any) -> None:
        """Copy those tensors of an event for which the size limit leaves room."""
        for place, (_, leaf) in enumerate(named_leaves(tree)):
            if isinstance(leaf, Tensor) and _is_ordinary(leaf) and leaf.nbytes <= self._left_bytes:
                self._left_bytes -= leaf.nbytes
                self._tensors[event, place] = leaf.detach().to("cpu", copy=True)

    def get(self, event: int, place: int) -> Tensor | None:
        """Return the copy of one tensor; None if the tensor was not copied, for example because of the size limit."""
        return self._tensors.get((event, place))


def how_they_differ(expected: Tensor, got: Tensor) -> str:
    """Describe how many elements differ between two tensors on the CPU, and by how much.

    Examples:
        >>> how_they_differ(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 2.0]))
        '2 of 3 elements differ, by up to 1; the first at [1]: 2 and 2.5'
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"{_about(expected)} and {_about(got)}"
    flat, other = expected.reshape(-1), got.reshape(-1)
    is_number = expected.is_floating_point() or expected.is_complex()
    differs = (flat != other) & ~(flat.isnan() & other.isnan()) if is_number else flat != other
    num_differing = int(differs.sum())
    if not num_differing:
        return "only in the sign of a zero or the payload of a NaN"
    first = int(differs.nonzero()[0, 0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), expected.shape)]
    text = f"{num_differing} of {flat.numel()} element{'s' if flat.numel() != 1 else ''} differ"
    text += "s" if num_differing == 1 else ""
    largest = _largest_difference(flat[differs], other[differs])
    text += f", by up to {largest:.3g}" if largest is not None else ""
    return f"{text}; the first at {place}: {_shown(flat[first])} and {_shown(other[first])}"


def _shown(element: Tensor) -> str:
    value = element.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _largest_difference(one: Tensor, other: Tensor) -> float | None:
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide)).abs()
    apart = apart[~apart.isnan()]
    return float(apart.max()) if apart.numel() else None
