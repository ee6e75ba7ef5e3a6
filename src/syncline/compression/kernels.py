"""The native form of encodings, for contiguous float32 tensors on the CPU. It has the bits of the form in PyTorch.

Each function makes one pass over the values, with as many threads as PyTorch uses for its own operations. It returns
None if the native library or the tensors do not permit it. The caller then uses the form in PyTorch. `NativeFactors`
has only those bits in common with it that all ranks must agree on (see `factors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.compression.blocks import Blocks
from syncline.compression.factors import Factors
from syncline.native import Library, library, library_if_any

_MAX_BLOCK_NUMEL = 1024
"""The largest block size that the native library can encode."""

_BEST_ISA = -1
"""The argument `isa` of the native library: the best instruction set of this processor."""


class Selected(NamedTuple):
    """The values of largest magnitude, in ascending order of their indices."""

    places: Tensor
    """The indices, as int32."""
    values: Tensor
    all_finite: bool
    """Whether it is certain that all values are finite, also those that were not selected."""


def blocks_for(blocks: Blocks, *tensors: Tensor | None) -> Blocks:
    """Return the form of `blocks` for these tensors. The native form, if it is possible, is the fastest."""
    native = _library_for(*tensors)
    if native is None or blocks.block_numel > _MAX_BLOCK_NUMEL:
        return blocks
    return NativeBlocks(blocks.bits, blocks.block_numel)


def can_encode(*tensors: Tensor | None) -> bool:
    """Return whether the native form can encode these tensors."""
    return _library_for(*tensors) is not None


def narrowed(values: Tensor, divisor: int, dtype: torch.dtype) -> Tensor | None:
    """Divide values by a number, and round them to bfloat16 or float16."""
    native = _library_for(values)
    if native is None:
        return None
    out = torch.empty(values.shape, dtype=dtype, device="cpu")
    is_bf16 = dtype is torch.bfloat16
    _run(native.narrow, values.data_ptr(), values.numel(), divisor, is_bf16, out.data_ptr())
    return out


def selected(
    values: Tensor, number: int, *, residual: Tensor | None = None, lost: Tensor | None = None
) -> Selected | None:
    """Add the residual to the values, write all sums to `lost`, and return the sums of largest magnitude.

    The sums are those of `total_of`, and the choice is that of `largest_places`.
    """
    native = _library_for(values, residual, lost)
    if native is None:
        return None
    places, chosen = _empty(number, torch.int32), _empty(number)
    target = values if lost is None else lost
    addresses = (values.data_ptr(), _address(residual), target.data_ptr())
    results = (places.data_ptr(), chosen.data_ptr())
    found = _run(native.select, *addresses, values.numel(), number, *results)
    return Selected(places, chosen, all_finite=found == 0)


class NativeBlocks(Blocks):
    """The native form of codes for blocks of values."""

    def encode(
        self,
        values: Tensor,
        num_rows: int,
        row_numel: int,
        *,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        factor: float = 1.0,
        unused_row: int | None = None,
    ) -> Tensor:
        rows = torch.empty(num_rows, self.num_bytes(row_numel), dtype=torch.uint8, device="cpu")
        for number in range(num_rows):
            if number == unused_row:
                continue
            start = min(number * row_numel, values.numel())
            sizes = (self.num_blocks(row_numel), min(row_numel, values.numel() - start))
            given = (_address(values, start), _address(residual, start), _address(lost, start))
            row = _address(rows, number * rows.shape[1])
            _run(library().quantize, self.bits, self.block_numel, *sizes, *given, factor, row)
        return rows

    def decode(self, rows: Tensor, row_numel: int, out: Tensor) -> Tensor:
        for row, part in zip(rows.split(1), out.split(row_numel), strict=False):
            self.mean(row, part)
        return out

    def mean(self, rows: Tensor, out: Tensor, *, own: tuple[int, Tensor] | None = None) -> Tensor:
        num_rows, num_bytes = rows.shape
        own_row, own_values = (-1, None) if own is None else own
        rows = rows.contiguous()
        sizes = (num_bytes // self.num_bytes(1), out.numel())
        given = (rows.data_ptr(), num_rows, num_bytes, own_row, _address(own_values))
        divisor = num_rows
        _run(library().mean_of_codes, self.bits, self.block_numel, *sizes, *given, divisor, out.data_ptr())
        return out


class NativeFactors(Factors):
    """The native form of the factors of matrices."""

    def __init__(self, rank: int, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(rank, shapes)
        self._shapes = torch.tensor(self.shapes, dtype=torch.int64, device="cpu")

    def left(self, values: Tensor, starts: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Tensor:
        message = _empty(self.left_numel + self.rest_numel)
        rest = _address(message, self.left_numel)
        self._call(library().left_factors, values, residual, lost, starts, message, rest)
        return message

    def right(self, total: Tensor, means: Tensor, out: Tensor) -> Tensor:
        rights = _empty(self.right_numel)
        rest = _address(means, self.left_numel)
        self._call(library().right_factors, total, out, means, rest, rights)
        return rights

    def subtract(self, total: Tensor, lefts: Tensor, rights: Tensor) -> None:
        self._call(library().lost_of_factors, total, lefts, rights)

    def mean(self, lefts: Tensor, right_means: Tensor, starts: Tensor, out: Tensor) -> None:
        self._call(library().mean_of_factors, out, lefts, right_means, starts)

    def _call(self, function: Callable[..., int], flat: Tensor, *others: Tensor | int | None) -> None:
        addresses = [_address(one) if isinstance(one, Tensor) else one for one in (flat, *others)]
        _run(function, self.rank, self._shapes.data_ptr(), len(self.shapes), flat.numel(), *addresses)


def _empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for the library, whatever torch's default device and dtype are."""
    return torch.empty(numel, dtype=dtype, device="cpu")


def _address(tensor: Tensor | None, start: int = 0) -> int | None:
    """Return the address of an element of a tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def _library_for(*tensors: Tensor | None) -> Library | None:
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


def _run(function: Callable[..., int], *arguments: object) -> int:
    """Call a function of the native library, and return its result. Raise MemoryError if it found no memory."""
    result = function(_BEST_ISA, *arguments, torch.get_num_threads())
    if result == -2:
        raise MemoryError("the native library found no memory to encode the values")
    assert result >= 0, result
    return result
