"""Quantize: a compression that sends values as codes of 8, 4 or 2 bits, with one scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from syncline.checks import checked_count, checked_flag, store
from syncline.compression.base import AllToAll, Averaging, Codec, Encoder, Gather, Layout
from syncline.compression.blocks import Blocks
from syncline.compression.kernels import blocks_for
from syncline.suggestions import suggests_arguments


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

    is_linear = False

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
        return (yield from self._by_chunks(blocks, values, residual, lost))

    def _by_chunks(
        self, blocks: Blocks, values: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> Averaging:
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
