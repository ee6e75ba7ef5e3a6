"""Quantize: values travel as codes of 8, 4 or 2 bits, with one scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.checks import checked_count, checked_flag, store
from syncline.compression.base import AllToAll, Averaged, Averaging, Codec, Encoder, Gather, Layout

__all__ = ["Quantize"]


_SCALE = torch.bfloat16
"""Of scales: the range of float32. Values are divided by the rounded scale, so it is off by the largest ones only."""

_SMALLEST_SCALE = 2.0**-126
"""Below, one over it is not a float32; such blocks count as zero."""

_INNER, _BORDER, _OUTER = 0.4528, 0.9816, 1.5104
"""The four levels -1.51, -0.45, 0.45 and 1.51 of a Gaussian of variance 1, and the border between two of them."""

_SLAB_NUMEL = 1 << 17
"""Values that a CPU encodes at once, so that what is made in between stays in its cache."""


@dataclass(frozen=True)
class Quantize(Codec):
    """A quarter of float32's bytes, an eighth, or a sixteenth: codes around zero, one bfloat16 scale a block.

    Codes of 8 and 4 bits are integers, scaled by the largest value of the block. Codes of 2 bits stand for four levels,
    scaled by the block's root mean square: those that lose least of values that are spread like a Gaussian (Lloyd 1982,
    Max 1960). Two bits are for sums that go on, with error feedback.

    Two ranks gather each other's codes. More than two work in two phases, so that bytes do not grow with ranks: rank r
    gets everybody's chunk r, adds them up in rank order, and encodes the mean, which all gather. A block with a value
    that is not finite comes out as not finite, so that a gradient scaler sees it.

    Args:
        bits: of each code; two codes of 4 bits, or four of 2, are packed in a byte.
        block_numel: values with a common scale, whole bytes of them; fewer are more precise and cost 16 bits a block.
        error_feedback: keep what rounding has lost, and add it to what is averaged next; one more copy in memory.

    Raises:
        ValueError: other bits, or blocks that do not fill whole bytes.

    Example:
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
        if checked_count("bits", self.bits, at_least=2, at_most=8) not in (2, 4, 8):
            raise ValueError(f"expected bits to be 8, 4 or 2, got {self.bits!r}")
        store(
            self,
            bits=int(self.bits),
            block_numel=checked_count("block_numel", self.block_numel, at_least=2),
            error_feedback=checked_flag("error_feedback", self.error_feedback),
        )
        if self.block_numel % self._multiple:
            raise ValueError(
                f"expected block_numel to be a multiple of {self._multiple} ({8 // self.bits} codes of {self.bits} "
                f"bits share a byte), got {self.block_numel}"
            )

    def encoder(self, layout: Layout) -> Encoder:
        return _QuantizeEncoder(self, layout)

    @property
    def _largest(self) -> int:
        """The largest integer; the smallest is minus that."""
        return 127 if self.bits == 8 else 7

    @property
    def _multiple(self) -> int:
        """Of values that fill whole bytes; an even number of bytes, so that a block is at least two values."""
        return 4 if self.bits == 2 else 2

    def num_bytes(self, numel: int) -> int:
        """Bytes of `numel` values; the last block is filled up."""
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
        """Each row as codes by itself: scales first, then the codes.

        Args:
            values: (num_rows, numel)
            lost: where to write what each value lost, of the same shape; None where nobody wants to know. It may be
                `values`.

        Returns:
            Bytes, (num_rows, num_bytes).
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
                came_through = levels.mul_(wide).view(num_rows, -1)[:, : stop - start]
                torch.sub(values[:, start:stop], came_through, out=lost[:, start:stop])
        encoded[:, :num_scale_bytes] = scales.view(torch.uint8)
        return encoded

    def _scales(self, blocks: Tensor) -> Tensor:
        """One for each block of (..., block_numel) values."""
        if self.bits == 2:
            return blocks.square().mean(2).sqrt_()
        return blocks.abs().amax(2).div_(self._largest)

    def _nearest(self, scaled: Tensor) -> Tensor:
        """The level that each value over its scale is nearest to; in place, if that is convenient."""
        if self.bits == 2:
            return torch.where(scaled.abs() > _BORDER, _OUTER, _INNER).copysign_(scaled).to(scaled.dtype)
        # None is too large: a scale is rounded down by 2**-8 at most, and 127 * (1 + 2**-8) is below 127.5.
        return scaled.round_()

    def _pack(self, levels: Tensor, packed: Tensor) -> None:
        """Levels, (..., block_numel), as bytes; neighbours in a byte are a half or a quarter of a block apart."""
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
        """The inverse of `_pack`."""
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
        """Parts of the blocks, of shape (num_rows, num_blocks, block_numel), that are worked on at once: on a CPU what
        fits into its cache, else all.
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
        """Of each rank's chunk: whole blocks, the last chunks are filled up."""

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
        own = chunks[rank].clone()  # it is not sent, so nothing of it is lost
        codes = self._quantize.encode_rows(chunks, chunks if wants_lost else None)
        received = yield AllToAll(codes)
        # One rank's chunk at a time, in rank order.
        mean = torch.zeros_like(own)
        for source in range(num_ranks):
            if source == rank:
                mean += own
            else:
                mean += self._quantize.decode(received[source][None], self._chunk_numel, values.dtype)[0]
        mean /= num_ranks
        # All ranks' residuals are averaged next time, and only this rank knows what is lost now.
        mine = self._quantize.encode_rows(mean[None], mean[None] if wants_lost else None)
        if wants_lost:
            torch.mul(mean, num_ranks, out=chunks[rank])
        gathered = yield Gather(mine.view(-1))
        decoded = self._quantize.decode(gathered.values, self._chunk_numel, values.dtype)
        lost = chunks.view(-1)[:numel] if wants_lost else None
        return Averaged(decoded.reshape(-1)[:numel], lost)


def _padded(values: Tensor, multiple_of: int) -> Tensor:
    """The last dimension filled up with zeros; the same tensor where there is nothing to fill."""
    missing = -values.shape[-1] % multiple_of
    return F.pad(values, (0, missing)) if missing else values


def _mean_of_rows(rows: Tensor) -> Tensor:
    """In rank order; rows of shape (num_ranks, numel)."""
    total = rows[0]
    for row in rows[1:]:
        total = total.add_(row)
    return total.div_(len(rows))
