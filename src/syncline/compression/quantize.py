"""Quantize: a compression that sends values as codes of 8, 4 or 2 bits, with one scale for each block of values.

The codes have two forms with the same bits: `Blocks` in PyTorch, and `NativeBlocks`. So ranks whose forms differ get
the same mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.checks import checked_count, checked_flag, store, suggests_arguments
from syncline.compression.base import (
    AllToAll,
    Averaging,
    Codec,
    Encoder,
    Gather,
    Layout,
    pairwise_sums,
    total_of,
)
from syncline.compression.kernels import address, library_for, run
from syncline.native import library

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

_MAX_BLOCK_NUMEL = 1024
"""The largest block size that the native library can encode."""


# ---------------------------------------------------------------------- codes


@dataclass(frozen=True)
class Blocks:
    """Encodes rows of values in blocks, and decodes them.

    An encoded row has the scales of its blocks, and then their codes. The last block is padded with zeros. In a block
    with a value that is not finite, all decoded values are NaN.

    This class is the form in PyTorch. It runs on any device and in any dtype, and is the reference for the native form.
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
            squares = _padded(blocks.square(), 1 << (self.block_numel - 1).bit_length())
            scales = (
                pairwise_sums(squares).squeeze(2).div_(self.block_numel).sqrt_()
            )  # the same on all processors
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
            given = (address(values, start), address(residual, start), address(lost, start))
            row = address(rows, number * rows.shape[1])
            run(library().quantize, self.bits, self.block_numel, *sizes, *given, factor, row)
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
        given = (rows.data_ptr(), num_rows, num_bytes, own_row, address(own_values))
        divisor = num_rows
        run(library().mean_of_codes, self.bits, self.block_numel, *sizes, *given, divisor, out.data_ptr())
        return out


def blocks_for(blocks: Blocks, *tensors: Tensor | None) -> Blocks:
    """Return the form of `blocks` for these tensors. The native form, if it is possible, is the fastest."""
    native = library_for(*tensors)
    if native is None or blocks.block_numel > _MAX_BLOCK_NUMEL:
        return blocks
    return NativeBlocks(blocks.bits, blocks.block_numel)


# ---------------------------------------------------------------------- the compression


@suggests_arguments
@dataclass(frozen=True, repr=False)
class Quantize(Codec):
    """A compression that sends each value as a code of 8, 4 or 2 bits, with one bfloat16 scale per block of values.

    Codes take a quarter, an eighth or a sixteenth of the bytes of float32.

    Codes of 8 and 4 bits are integers around zero, scaled by the largest value of the block. Codes of 2 bits stand for
    four levels, scaled by the block's root mean square. These levels minimize the error for values with a Gaussian
    distribution (Lloyd 1982, Max 1960). Two bits are meant for repeated averages with error feedback.

    Two ranks exchange the codes of all their values. More ranks use two phases, so that the bytes per rank do not grow
    with the number of ranks. In the first phase, rank r receives chunk r of the values from all ranks, and adds these
    chunks up in rank order. In the second phase, rank r encodes the mean of its chunk, and all ranks gather the means.
    If a block contains a value that is not finite, the result of the block is NaN, so that a gradient scaler detects
    it.

    Args:
        bits: the number of bits per code. Two codes of 4 bits, or four codes of 2 bits, are packed into one byte.
        block_numel: the number of values with a common scale; a multiple of 2, or of 4 for codes of 2 bits. Smaller
            blocks give more precise values, but each block adds 16 bits for its scale.
        error_feedback: True to keep the rounding errors, and add them to the next values. This takes memory for one
            more copy of the values.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `bits` is not 8, 4 or 2, or `block_numel` is not a valid multiple.

    Examples:
        >>> codes = Quantize(bits=4, block_numel=4).encode(torch.tensor([7.0, -3.0, 0.4, 1.0]))
        >>> codes.numel()  # a scale and two bytes
        4
        >>> Quantize(bits=4, block_numel=4).decode(codes[None], 4, torch.float32)
        tensor([[ 7., -3.,  0.,  1.]])
    """

    bits: Literal[8, 4, 2] = 8
    block_numel: int = 128
    error_feedback: bool = True

    def __post_init__(self) -> None:
        bits, block_numel = (
            checked_count("bits", self.bits),
            checked_count("block_numel", self.block_numel, at_least=2),
        )
        if bits not in (8, 4, 2):
            raise ValueError(f"expected bits to be 8, 4 or 2, got {bits}")
        multiple = 4 if bits == 2 else 2
        if block_numel % multiple:
            raise ValueError(
                f"Quantize: expected block_numel to be a multiple of {multiple} for codes of {bits} bits, got "
                f"{block_numel}. Use for example block_numel=128"
            )
        store(self, bits=bits, block_numel=block_numel)
        checked_flag("error_feedback", self.error_feedback)

    def encoder(self, layout: Layout) -> Encoder:
        return _QuantizeEncoder(self, layout)

    @property
    def _blocks(self) -> Blocks:
        return Blocks(self.bits, self.block_numel)

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes that encode `numel` values. The last block is padded."""
        return self._blocks.num_bytes(numel)

    def encode(self, values: Tensor) -> Tensor:
        return blocks_for(self._blocks, values).encode(values, 1, values.numel()).view(-1)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(codes.shape[0] * numel, dtype=dtype, device=codes.device)
        return blocks_for(self._blocks, out).decode(codes, numel, out).view(-1, numel)


class _QuantizeEncoder(Encoder):
    def __init__(self, quantize: Quantize, layout: Layout) -> None:
        super().__init__(layout)
        self._blocks = quantize._blocks
        chunk = -(-layout.numel // layout.num_ranks)
        self._chunk_numel = self._blocks.num_blocks(chunk) * quantize.block_numel
        """The number of values in the chunk of each rank, a multiple of the block size. The last chunks are padded."""

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        if not values.numel():
            return values
        blocks = blocks_for(self._blocks, values, residual, lost)
        if self.layout.num_ranks <= 2:
            codes = blocks.encode(values, 1, values.numel(), residual=residual, lost=lost)
            gathered = yield Gather(codes.view(-1))
            return blocks.mean(gathered.values, values)
        rank, num_ranks, chunk_numel = self.layout.rank, self.layout.num_ranks, self._chunk_numel
        chunk = slice(rank * chunk_numel, (rank + 1) * chunk_numel)  # empty, or shorter, on the last ranks
        # It is added unencoded, because it is not sent.
        own = values[chunk].clone() if residual is None else residual[chunk] + values[chunk]
        codes = blocks.encode(values, num_ranks, chunk_numel, residual=residual, lost=lost, unused_row=rank)
        received = yield AllToAll(codes)
        mean = blocks.mean(received, own, own=(rank, own))
        # Only this rank knows the error of encoding the mean. It is multiplied by the number of ranks, because the
        # next averaging divides all residuals by that number.
        own_lost = None if lost is None else lost[chunk]
        mine = blocks.encode(mean, 1, chunk_numel, lost=own_lost, factor=num_ranks)
        gathered = yield Gather(mine.view(-1))
        return blocks.decode(gathered.values, chunk_numel, values)
