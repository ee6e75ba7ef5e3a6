"""Conversion of tensors to dtypes that all backends of torch move and reduce, and back.

Gloo and NCCL lack int16 and the unsigned types; Gloo lacks complex numbers in some operations. The maximum and minimum
of floats with a NaN depend on the backend: Gloo keeps or drops the NaN, depending on the rank that has it. So floats
are sent as integers in the same order, in which NaN comes last or first, and the result is NaN on every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from syncline.transport.base import ReduceOp

__all__ = ["Back", "movable", "put_back", "reducible", "writing"]


Back = Callable[[Tensor], Tensor]
"""A function that converts the received tensor back to values."""

_MOVED_AS_THEY_ARE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}


def movable(tensor: Tensor) -> Tensor:
    """Return a view of the same memory in a dtype that every backend moves."""
    if tensor.dtype in _MOVED_AS_THEY_ARE:
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().view(-1).view(torch.uint8)


def reducible(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, Back | None]:
    """Return `tensor` in a dtype that every backend reduces correctly, and the conversion back.

    The conversion is None if the returned tensor uses the memory of `tensor`.
    """
    if tensor.dtype is torch.int16:
        return tensor.to(torch.int32), _as_it_is
    if op in ("max", "min") and tensor.is_floating_point():
        return _in_order(tensor.detach(), op), _out_of_order
    wire = tensor.detach() if tensor.requires_grad else tensor
    if op == "mean" and wire.device.type == "cpu":
        wire = _alias(wire)
    return (torch.view_as_real(wire) if wire.is_complex() else wire), None


def _alias(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor in the same memory.

    Gloo divides in place for a mean, and must not write to an inference tensor.
    """
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def put_back(target: Tensor, result: Tensor, back: Back | None) -> Callable[[], object] | None:
    """Return a function that copies `result` to `target` after the operation; None if they have the same memory."""
    if back is None:
        return None

    def finish() -> None:
        with writing():
            target.detach().view(-1).copy_(back(result).view(-1))

    return finish


def writing() -> AbstractContextManager[object]:
    """Return inference mode, in which every tensor may be written. Elsewhere, inference tensors may not.

    `is_inference` cannot replace it: it is False for `.data` of an inference tensor, but a view of that still cannot be
    written.
    """
    return torch.inference_mode()


def _as_it_is(result: Tensor) -> Tensor:
    return result


def _in_order(values: Tensor, op: ReduceOp) -> Tensor:
    """Return floats as integers in the same order: the bits of negative numbers are inverted except for the sign."""
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    nan = torch.full((), torch.nan, dtype=wide.dtype, device=wide.device)
    nan = torch.copysign(nan, torch.ones_like(nan) if op == "max" else -torch.ones_like(nan))
    return _flipped(torch.where(wide.isnan(), nan, wide).view(_integer_like(wide)))


def _out_of_order(ordered: Tensor) -> Tensor:
    return _flipped(ordered).view(torch.float64 if ordered.dtype is torch.int64 else torch.float32)


def _flipped(bits: Tensor) -> Tensor:
    most = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (most.bits - 1)) & most.max)


def _integer_like(values: Tensor) -> torch.dtype:
    return torch.int64 if values.dtype is torch.float64 else torch.int32
