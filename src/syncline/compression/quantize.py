"""Quantize: values travel as integers of 8 or 4 bits, with one scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.compression.base import AllToAll, Averaged, Averaging, Codec, Encoder, Gather, Layout

__all__ = ["Quantize"]

_SCALE = torch.bfloat16
"""Of scales: the range of float32. Values are divided by the rounded scale, so it is off by the largest ones only."""
_SMALLEST_SCALE = 2.0**-126
"""Below, one over it is not a float32; such blocks count as zero."""

_SLAB_NUMEL = 1 << 17
"""Values that a CPU encodes at once, so that what is made in between stays in its cache."""


@dataclass(frozen=True)
class Quantize(Codec):
    """A quarter of float32's bytes, or an eighth: symmetric integers around zero, one bfloat16 scale a block.

    Two ranks gather each other's codes. More than two work in two phases, so that bytes do not grow with ranks: rank r
    gets everybody's chunk r, adds them up in rank order, and encodes the mean, which all gather. A block with a value
    that is not finite comes out as not finite, so that a gradient scaler sees it.

    Args:
        bits: of each code; two codes of 4 bits are packed in a byte.
        block_numel: values with a common scale, an even number; fewer are more precise and cost 16 bits a block.
        error_feedback: keep what rounding has lost, and add it to what is averaged next; one more copy in memory.

    Raises:
        ValueError: other bits, or blocks that are not even.

    Example:
        >>> codes = Quantize(bits=4, block_numel=4).encode(torch.tensor([7.0, -3.0, 0.4, 1.0]))
        >>> codes.numel()  # a scale and two bytes
        4
        >>> Quantize(bits=4, block_numel=4).decode(codes[None], 4, torch.float32)
        tensor([[ 7., -3.,  0.,  1.]])
    """

    bits: Literal[8, 4] = 8
    block_numel: int = 128
    error_feedback: bool = True

    is_linear = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"expected Quantize(bits=8) or Quantize(bits=4), got {self.bits!r}")
        if self.block_numel < 2 or self.block_numel % 2:
            raise ValueError(
                f"expected block_numel to be even (two codes share a byte) and at least 2, got {self.block_numel}"
            )

    def encoder(self, layout: Layout) -> Encoder:
        return _QuantizeEncoder(self, layout)

    @property
    def _largest(self) -> int:
        """The largest code; the smallest is minus that."""
        return 127 if self.bits == 8 else 7

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
        half = self.block_numel // 2
        for slab in self._slabs(values):
            part, bytes_of_part = values[:, slab], packed[:, slab]
            if self.bits == 8:
                part.copy_(bytes_of_part.view(torch.int8))
            else:
                part[..., :half].copy_(bytes_of_part & 15)
                part[..., half:].copy_(bytes_of_part >> 4)
                part.sub_(8)
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
        size, half = self.block_numel, self.block_numel // 2
        blocks = _padded(values, size).view(num_rows, -1, size)  # (num_rows, num_blocks, block_numel)
        num_blocks = blocks.shape[1]
        scales = torch.empty(num_rows, num_blocks, dtype=_SCALE, device=values.device)
        num_scale_bytes = num_blocks * _SCALE.itemsize
        encoded = torch.empty(num_rows, self.num_bytes(numel), dtype=torch.uint8, device=values.device)
        packed = encoded[:, num_scale_bytes:].view(num_rows, num_blocks, -1)
        for slab in self._slabs(blocks):
            part = blocks[:, slab]
            scales[:, slab] = part.abs().amax(2).div_(self._largest)
            wide = scales[:, slab, None].to(values.dtype)
            # No code is too large: a scale is rounded down by 2**-8 at most, and 127 * (1 + 2**-8) is below 127.5.
            codes = (part * torch.where(wide < _SMALLEST_SCALE, 0, wide.reciprocal())).round_()
            if self.bits == 8:
                packed[:, slab] = codes.to(torch.int8).view(torch.uint8)
            else:
                packed[:, slab] = torch.add(codes[..., :half], codes[..., half:], alpha=16).add_(8 + 16 * 8)
            if lost is not None:
                start, stop = slab.start * size, min(slab.stop * size, numel)
                came_through = codes.mul_(wide).view(num_rows, -1)[:, : stop - start]
                torch.sub(values[:, start:stop], came_through, out=lost[:, start:stop])
        encoded[:, :num_scale_bytes] = scales.view(torch.uint8)
        return encoded

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
