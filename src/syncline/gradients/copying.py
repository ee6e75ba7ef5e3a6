"""The copy of a gradient into its bucket, which also looks for NaN and infinity where this costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.native import library_if_any

_BEST_ISA = -1
"""The argument `isa` of the native library: the best instruction set of this processor."""


def copy_scaled(view: Tensor, gradient: Tensor | None, scale: float) -> bool:
    """Set `view` to `gradient * scale`. Return whether all values in `view` are known to be finite.

    If the gradient is None, set the view to zero. If the gradient is the view itself, scale it in place.

    The native library copies gradients in float32. It reads each value anyway, so the check is free. After any
    other copy it is unknown whether the values are finite.
    """
    if gradient is None:
        view.zero_()
        return True
    if gradient is view and scale == 1.0:
        return False
    if _have_same_form(gradient, view):
        library = library_if_any()
        if library is not None:
            found = library.scale(
                _BEST_ISA,
                gradient.data_ptr(),
                gradient.numel(),
                scale,
                view.data_ptr(),
                torch.get_num_threads(),
            )
            return bool(found == 0)
    if gradient is view:
        view.mul_(scale)
    elif scale == 1.0:
        view.copy_(gradient)
    elif view.dtype is not gradient.dtype:
        view.copy_(gradient).mul_(scale)  # convert first, so that the product is computed in the view's dtype
    else:
        torch.mul(gradient, scale, out=view)
    return False


def _have_same_form(gradient: Tensor, view: Tensor) -> bool:
    """Return whether both tensors are plain float32 memory on the CPU, with their values in the same order."""
    return (
        type(gradient) is Tensor
        and gradient.dtype is torch.float32
        and view.dtype is torch.float32
        and gradient.is_cpu
        and view.is_cpu
        and gradient.layout is torch.strided
        # A view of a bucket has no gaps.
        and ((gradient.is_contiguous() and view.is_contiguous()) or gradient.stride() == view.stride())
        and not gradient.is_neg()
    )
