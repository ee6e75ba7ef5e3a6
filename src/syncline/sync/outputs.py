"""The tensors in whatever a forward returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(output: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples, dictionaries and dataclasses; other objects are not looked into.

    Example:
        >>> import torch
        >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
