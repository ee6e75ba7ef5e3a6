"""Functions that find the tensors in a forward's output, and call back when a backward reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["tensors_in", "when_backward_reaches", "when_backward_reaches_any"]


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and dataclasses; other objects are not searched.

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


def when_backward_reaches(tensor: Tensor, call: Callable[[Any], None]) -> None:
    """Register `call` to be called when a backward reaches `tensor`, which requires grad.

    Example:
        >>> import torch
        >>> y = torch.ones(1, requires_grad=True) * 2
        >>> when_backward_reaches(y, lambda _: print("here"))
        >>> y.backward()
        here
    """
    if tensor.grad_fn is None:
        tensor.register_hook(call)
    else:  # a hook on the node costs a third of one on the tensor
        tensor.grad_fn.register_prehook(call)


def when_backward_reaches_any(output: object, call: Callable[[Any], None]) -> None:
    """Register `call` to be called when a backward reaches any tensor of `output` that requires grad."""
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            when_backward_reaches(tensor, call)
