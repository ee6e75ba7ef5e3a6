"""Codes of 8, 4 or 2 bits for blocks of values, with one scale per block, in PyTorch.

The native form (`kernels.py`) has the same bits. So ranks whose forms differ get the same mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.compression.base import pairwise_sums, total_of

SCALE = torch.bfloat16
"""The dtype of the scales, which has the range of float32.

Values are divided by the rounded scale. So the rounding of a scale adds no error, except to the largest values of a
block."""

_NAN_BITS = 0x7FC0
"""The bits of the NaN that is the scale of a block whose values are not all finite."""

_SMALLEST_SCALE = 2.0**-126
"""The smallest scale that is used. Smaller scales count as zero, because float32 cannot represent their reciprocals."""

_INNER, _BORDER, _OUTER = 0.4528, 0.9816, 1.5104
"""The levels of 2-bit codes, which are the best for a Gaussian of variance 1: -1.51, -0.45, 0.45 and 1.51.

0.98 is the border between the two positive levels."""

_SLAB_NUMEL = 1 << 17
"""The number of values that a CPU encodes at a time, so that temporary values stay in its cache."""


@dataclass(frozen=True)
class Blocks:
    """Encodes rows of values in blocks, and decodes them.

    An encoded row has the scales of its blocks, and then their codes. The last block is padded with zeros. In a block
    with a value that is not finite, all decoded values are NaN.

    This class is the form in PyTorch. It runs on any device and in any dtype, and is the reference for the native form
    (`kernels.py`).
    """

    bits: int
    """The number of bits per code: 8, 4 or 2."""
    block_numel: int
    """The number of values with a common scale."""

    def num_blocks(self, numel: int) -> int:
        """Return the number of blocks that hold `numel` values."""
        return -(-numel // self.block_numel)

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes of a row that encodes `numel` values."""
        return self.num_blocks(numel) * (SCALE.itemsize + self.block_numel * self.bits // 8)

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
        """Encode the sum of values and residual as rows.

        Args:
            values: a flat tensor of at most num_rows * row_numel values. Missing values count as zero.
            num_rows: the number of rows.
            row_numel: the number of values in each row. If there are several rows, a multiple of the block size.
            residual: see `Encoder.mean`.
            lost: see `Encoder.mean`. It can also be `values` itself.
            factor: the number by which the error is multiplied before it is written to `lost`.
            unused_row: a row whose codes and errors are not needed, and may be arbitrary. None if all are needed.

        Returns:
            The encoded rows, of shape (num_rows, num_bytes(row_numel)) and dtype uint8.
        """
        total = total_of(values, residual, lost)
        padded_numel, size = self.num_blocks(row_numel) * self.block_numel, self.block_numel
        padded = _padded(total, num_rows * row_numel).view(num_rows, row_numel)
        blocks = _padded(padded, padded_numel).view(num_rows, -1, size)  # (num_rows, num_blocks, block_numel)
        num_blocks = blocks.shape[1]
        scales = torch.empty(num_rows, num_blocks, dtype=SCALE, device=values.device)
        num_scale_bytes = num_blocks * SCALE.itemsize
        encoded = torch.empty(num_rows, self.num_bytes(row_numel), dtype=torch.uint8, device=values.device)
        packed = encoded[:, num_scale_bytes:].view(num_rows, num_blocks, -1)
        for slab in self._slabs(blocks):
            part = blocks[:, slab]
            scales[:, slab] = self._scales(part)
            wide = scales[:, slab, None].to(values.dtype)
            inverse = torch.where(wide >= _SMALLEST_SCALE, wide.reciprocal(), 0)  # zero if the scale is NaN
            levels = self._nearest((part * inverse).nan_to_num_(0.0))
            self._pack(levels, packed[:, slab])
            if lost is not None:
                error = torch.sub(part, levels.mul_(wide), out=part)
                (error if factor == 1 else error.mul_(factor)).nan_to_num_(0.0, 0.0, 0.0)
        encoded[:, :num_scale_bytes] = scales.view(torch.uint8)
        if lost is not None and blocks.data_ptr() != lost.data_ptr():  # it was padded
            lost.copy_(blocks.view(num_rows, -1)[:, :row_numel].reshape(-1)[: lost.numel()])
        return encoded

    def decode(self, rows: Tensor, row_numel: int, out: Tensor) -> Tensor:
        """Decode rows, and write their values into `out`, one row after the other.

        Args:
            rows: encoded rows, of shape (num_rows, num_bytes(row_numel)).
            row_numel: the number of values in each row.
            out: a flat tensor. If it is shorter than the rows together, the last values are left out.

        Returns:
            The tensor `out`.
        """
        values = self._values(rows, out.dtype)[:, :row_numel]
        return out.copy_(values.reshape(-1)[: out.numel()])

    def mean(self, rows: Tensor, out: Tensor, *, own: tuple[int, Tensor] | None = None) -> Tensor:
        """Decode rows of the same values of all ranks, and write their mean into `out`.

        The rows are added in their order.

        Args:
            rows: encoded rows, of shape (num_ranks, num_bytes).
            out: a flat tensor. If it is shorter than a row, the last values of the rows are left out.
            own: the number of a row that is not decoded, and the values that are used instead, of the shape of `out`.
                They may be `out` itself.

        Returns:
            The tensor `out`.
        """
        total: Tensor | None = None
        for number, row in enumerate(rows):
            if own is not None and own[0] == number:
                part = own[1].clone()
            else:
                part = self._values(row[None], out.dtype)[0, : out.numel()]
            total = part if total is None else total.add_(part)
        assert total is not None
        return torch.div(total, len(rows), out=out)

    def _values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode whole rows, with their padding. The result has the shape (num_rows, num_blocks * block_numel)."""
        num_rows, num_bytes = rows.shape
        num_blocks = num_bytes // self.num_bytes(1)
        num_scale_bytes = num_blocks * SCALE.itemsize
        scales = rows[:, :num_scale_bytes].clone(memory_format=torch.contiguous_format).view(SCALE)
        wide = scales.to(dtype)[..., None]  # (num_rows, num_blocks, 1)
        packed = rows[:, num_scale_bytes:].view(num_rows, num_blocks, -1)
        values = torch.empty(
            num_rows, num_blocks, self.block_numel, dtype=dtype, device=rows.device
        )  # (num_rows, num_blocks, block_numel)
        for slab in self._slabs(values):
            part = values[:, slab]
            self._unpack(packed[:, slab], part)
            part.mul_(wide[:, slab])
        return values.view(num_rows, -1)

    def _scales(self, blocks: Tensor) -> Tensor:
        """Return the scale of each block. The shape of `blocks` is (num_rows, num_blocks, block_numel)."""
        if self.bits == 2:
            scales = _sums_of_squares(blocks).div_(self.block_numel).sqrt_()
        else:
            scales = blocks.abs().amax(2).div_(127 if self.bits == 8 else 7)
        rounded = scales.to(SCALE)
        # One NaN, because the bits of a NaN depend on the processor.
        rounded.view(torch.int16).masked_fill_(~rounded.isfinite(), _NAN_BITS)
        return rounded

    def _nearest(self, scaled: Tensor) -> Tensor:
        """Return the level nearest to each value of the tensor `scaled`, which is overwritten for some code sizes."""
        if self.bits == 2:
            return torch.where(scaled.abs() > _BORDER, _OUTER, _INNER).copysign_(scaled).to(scaled.dtype)
        # No level is too large: a scale is rounded down by 2**-8 at most, and 127 * (1 + 2**-8) is below 127.5.
        return scaled.round_()

    def _pack(self, levels: Tensor, packed: Tensor) -> None:
        """Write the levels of blocks as bytes into `packed`.

        The values that are packed into one byte are half a block apart (4 bits) or a quarter of a block apart (2 bits).

        Args:
            levels: the levels, of shape (num_rows, num_blocks, block_numel).
            packed: the bytes, of shape (num_rows, num_blocks, bytes per block).
        """
        if self.bits == 8:
            packed.copy_(levels.to(torch.int8).view(torch.uint8))
        elif self.bits == 4:
            low, high = levels.chunk(2, dim=2)
            packed.copy_(torch.add(low, high, alpha=16).add_(8 + 16 * 8))
        else:
            codes = (levels > -1).to(torch.uint8).add_(levels > 0).add_(levels > 1)  # 0 to 3
            first, *others = codes.chunk(4, dim=2)
            packed.copy_(first)
            for place, code in enumerate(others, start=1):
                packed.add_(code, alpha=4**place)

    def _unpack(self, packed: Tensor, levels: Tensor) -> None:
        """Read the bytes that `_pack` has written, and write the levels that they stand for into `levels`."""
        if self.bits == 8:
            levels.copy_(packed.view(torch.int8))
        elif self.bits == 4:
            low, high = levels.chunk(2, dim=2)
            low.copy_(packed & 15)
            high.copy_(packed >> 4)
            levels.sub_(8)
        else:
            table = torch.tensor([-_OUTER, -_INNER, _INNER, _OUTER], device=packed.device).to(levels.dtype)
            for place, part in enumerate(levels.chunk(4, dim=2)):
                part.copy_(table[((packed >> (2 * place)) & 3).int()])

    def _slabs(self, blocks: Tensor) -> Iterator[slice]:
        """Yield slices of the dimension num_blocks. The caller processes one slice at a time.

        On a CPU, the blocks of one slice fit into the cache. On other devices there is only one slice.

        Args:
            blocks: a tensor of shape (num_rows, num_blocks, block_numel).
        """
        num_rows, num_blocks, _ = blocks.shape
        step = max(1, _SLAB_NUMEL // (num_rows * self.block_numel)) if blocks.is_cpu else num_blocks
        for start in range(0, num_blocks, step):
            yield slice(start, min(start + step, num_blocks))


def _padded(values: Tensor, numel: int) -> Tensor:
    """Pad the last dimension with zeros to `numel` elements. Return the same tensor if it needs no padding."""
    missing = numel - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def _sums_of_squares(blocks: Tensor) -> Tensor:
    """Return the sum of squares of each block, with the same bits on every kind of processor."""
    return pairwise_sums(_padded(blocks.square(), 1 << (blocks.shape[2] - 1).bit_length())).squeeze(2)
