"""Quantize: a compression that sends values as codes of 8, 4 or 2 bits, with one scale for each block of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.checks import checked_count, checked_flag, store
from syncline.compression.base import AllToAll, Averaged, Averaging, Codec, Encoder, Gather, Layout

_SCALE = torch.bfloat16
"""The dtype of the scales, which has the range of float32.

Values are divided by the rounded scale. So the rounding of a scale adds no error, except to the largest values of a
block."""

_SMALLEST_SCALE = 2.0**-126
"""The smallest scale that is used. Smaller scales count as zero, because float32 cannot represent their reciprocals."""

_INNER, _BORDER, _OUTER = 0.4528, 0.9816, 1.5104
"""The levels of 2-bit codes, which are the best for a Gaussian of variance 1: -1.51, -0.45, 0.45 and 1.51.

0.98 is the border between the two positive levels."""

_SLAB_NUMEL = 1 << 17
"""The number of values that a CPU encodes at a time, so that temporary values stay in its cache."""


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
    If a block contains a value that is not finite, the result of the block is not finite, so that a gradient scaler
    detects it.

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

    is_linear = False

    def __post_init__(self) -> None:
        bits = checked_count("bits", self.bits, at_least=2, at_most=8)
        if bits not in (2, 4, 8):
            raise ValueError(f"Quantize: expected bits to be 8, 4 or 2, got {self.bits!r}")
        store(self, bits=bits, block_numel=checked_count("block_numel", self.block_numel, at_least=2))
        checked_flag("error_feedback", self.error_feedback)
        if self.block_numel % self._multiple:
            raise ValueError(
                f"Quantize: expected block_numel to be a multiple of {self._multiple} for codes of {self.bits} bits, "
                f"got {self.block_numel}. Use for example block_numel=128"
            )

    def encoder(self, layout: Layout) -> Encoder:
        return _QuantizeEncoder(self, layout)

    @property
    def _largest(self) -> int:
        """The largest integer code of 8 or 4 bits. The smallest code is its negative."""
        return 127 if self.bits == 8 else 7

    @property
    def _multiple(self) -> int:
        """The number by which `block_numel` must be divisible."""
        return 4 if self.bits == 2 else 2

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes that encode `numel` values. The last block is padded."""
        num_blocks = -(-numel // self.block_numel)
        return num_blocks * (_SCALE.itemsize + self.block_numel * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        return self.encode_rows(values[None], None).view(-1)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        num_rows = codes.shape[0]
        num_blocks = -(-numel // self.block_numel)
        num_scale_bytes = num_blocks * _SCALE.itemsize
        scales = codes[:, :num_scale_bytes].clone(memory_format=torch.contiguous_format).view(_SCALE)
        wide = scales.to(dtype)[..., None]  # (num_rows, num_blocks, 1)
        packed = codes[:, num_scale_bytes:].view(num_rows, num_blocks, -1)
        values = torch.empty(
            num_rows, num_blocks, self.block_numel, dtype=dtype, device=codes.device
        )  # (num_rows, num_blocks, block_numel)
        for slab in self._slabs(values):
            part = values[:, slab]
            self._unpack(packed[:, slab], part)
            part.mul_(wide[:, slab])
        return values.view(num_rows, -1)[:, :numel]

    def encode_rows(self, values: Tensor, lost: Tensor | None) -> Tensor:
        """Encode each row of `values` separately.

        Args:
            values: a tensor of shape (num_rows, numel).
            lost: a tensor of the same shape, into which the error of each value is written. It can be `values` itself.
                Pass None if the errors are not needed.

        Returns:
            A tensor of bytes, of shape (num_rows, num_bytes). Each row contains the scales, and then the codes.
        """
        num_rows, numel = values.shape
        size = self.block_numel
        blocks = _padded(values, size).view(num_rows, -1, size)  # (num_rows, num_blocks, block_numel)
        num_blocks = blocks.shape[1]
        scales = torch.empty(num_rows, num_blocks, dtype=_SCALE, device=values.device)
        num_scale_bytes = num_blocks * _SCALE.itemsize
        encoded = torch.empty(num_rows, self.num_bytes(numel), dtype=torch.uint8, device=values.device)
        packed = encoded[:, num_scale_bytes:].view(num_rows, num_blocks, -1)
        for slab in self._slabs(blocks):
            part = blocks[:, slab]
            scales[:, slab] = self._scales(part)
            wide = scales[:, slab, None].to(values.dtype)
            levels = self._nearest(part * torch.where(wide < _SMALLEST_SCALE, 0, wide.reciprocal()))
            self._pack(levels, packed[:, slab])
            if lost is not None:
                start, stop = slab.start * size, min(slab.stop * size, numel)
                received = levels.mul_(wide).view(num_rows, -1)[:, : stop - start]
                torch.sub(values[:, start:stop], received, out=lost[:, start:stop])
        encoded[:, :num_scale_bytes] = scales.view(torch.uint8)
        return encoded

    def _scales(self, blocks: Tensor) -> Tensor:
        """Return the scale of each block. The shape of `blocks` is (num_rows, num_blocks, block_numel)."""
        if self.bits == 2:
            return blocks.square().mean(2).sqrt_()
        return blocks.abs().amax(2).div_(self._largest)

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


class _QuantizeEncoder(Encoder):
    def __init__(self, quantize: Quantize, layout: Layout) -> None:
        super().__init__(layout)
        self._quantize = quantize
        chunk = -(-layout.numel // layout.num_ranks)
        self._chunk_numel = -(-chunk // quantize.block_numel) * quantize.block_numel
        """The number of values in the chunk of each rank, a multiple of the block size. The last chunks are padded."""

    def mean(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        if not values.numel():
            return Averaged(values)
        if self.layout.num_ranks <= 2:
            return (yield from self._by_gathering(values, wants_lost=wants_lost))
        return (yield from self._by_chunks(values, wants_lost=wants_lost))

    def _by_gathering(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        row = values[None]
        codes = self._quantize.encode_rows(row, row if wants_lost else None)
        gathered = yield Gather(codes.view(-1))
        decoded = self._quantize.decode(gathered.values, values.numel(), values.dtype)
        return Averaged(_mean_of_rows(decoded), values if wants_lost else None)

    def _by_chunks(self, values: Tensor, *, wants_lost: bool) -> Averaging:
        rank, num_ranks, numel = self.layout.rank, self.layout.num_ranks, values.numel()
        chunks = _padded(values, num_ranks * self._chunk_numel).view(num_ranks, -1)
        own = chunks[rank].clone()  # added unencoded, because it is not sent
        codes = self._quantize.encode_rows(chunks, chunks if wants_lost else None)
        received = yield AllToAll(codes)
        # Add one rank's chunk at a time, in rank order.
        mean = torch.zeros_like(own)
        for source in range(num_ranks):
            if source == rank:
                mean += own
            else:
                mean += self._quantize.decode(received[source][None], self._chunk_numel, values.dtype)[0]
        mean /= num_ranks
        # Only this rank knows the error of encoding the mean. It is multiplied by the number of ranks, because the
        # next averaging divides all residuals by that number.
        mine = self._quantize.encode_rows(mean[None], mean[None] if wants_lost else None)
        if wants_lost:
            torch.mul(mean, num_ranks, out=chunks[rank])
        gathered = yield Gather(mine.view(-1))
        decoded = self._quantize.decode(gathered.values, self._chunk_numel, values.dtype)
        lost = chunks.view(-1)[:numel] if wants_lost else None
        return Averaged(decoded.reshape(-1)[:numel], lost)


def _padded(values: Tensor, multiple_of: int) -> Tensor:
    """Pad the last dimension with zeros until its size is a multiple of `multiple_of`.

    Return the same tensor if it needs no padding.
    """
    missing = -values.shape[-1] % multiple_of
    return F.pad(values, (0, missing)) if missing else values


def _mean_of_rows(rows: Tensor) -> Tensor:
    """Return the mean of the rows of a tensor of shape (num_ranks, numel).

    The rows are added in rank order. The tensor `rows` is overwritten.
    """
    total = rows[0]
    for row in rows[1:]:
        total = total.add_(row)
    return total.div_(len(rows))
