"""The common parts of the native forms of encodings: whether one can be used, and a call of the library.

A native form is for contiguous float32 tensors on the CPU. It makes one pass over the values, with as many threads as
PyTorch uses for its own operations. It is in the same file as the form in PyTorch, whose bits it has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from syncline.native import Library, library_if_any

_BEST_ISA = -1
"""The argument `isa` of the native library: the best instruction set of this processor."""


def address(tensor: Tensor | None, start: int = 0) -> int | None:
    """Return the address of an element of a tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def library_for(*tensors: Tensor | None) -> Library | None:
    """Return the native library, or None if it cannot be loaded or cannot encode these tensors."""
    for tensor in tensors:
        if tensor is not None and not (
            type(tensor) is Tensor
            and tensor.device.type == "cpu"
            and tensor.dtype is torch.float32
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            return None
    return library_if_any()


def run(function: Callable[..., int], *arguments: object) -> int:
    """Call a function of the native library, and return its result. Raise MemoryError if it found no memory."""
    result = function(_BEST_ISA, *arguments, torch.get_num_threads())
    if result == -2:
        raise MemoryError("the native library found no memory to encode the values")
    assert result >= 0, result
    return result
