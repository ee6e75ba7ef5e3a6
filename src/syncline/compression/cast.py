"""Cast: a compression that sends values in a narrower floating-point type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.checks import suggests_arguments
from syncline.compression.base import Averaging, Codec, Encoder, Layout, Sum, set_lost, total_of
from syncline.compression.kernels import library_for, run


@suggests_arguments
@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """A compression that sends values in a narrower floating-point type, in half the bytes of float32.

    Values are divided by the number of ranks, rounded to the narrower type, and added up in that type.

    Args:
        dtype: torch.bfloat16 (8 bits of precision, the range of float32) or torch.float16 (11 bits of precision,
            magnitudes from 6e-8 to 65,504, so gradients need a gradient scaler).

    Raises:
        TypeError: `dtype` is not a torch.dtype.
        ValueError: `dtype` is neither torch.bfloat16 nor torch.float16.

    Examples:
        >>> print(Cast(), Cast(torch.float16))
        Cast(dtype=bfloat16) Cast(dtype=float16)
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            error = ValueError if isinstance(self.dtype, torch.dtype) else TypeError
            raise error(f"Cast: expected dtype to be torch.bfloat16 or torch.float16, got {self.dtype!r}")

    def encoder(self, layout: Layout) -> Encoder:
        return _CastEncoder(self, layout)

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)


class _CastEncoder(Encoder):
    def __init__(self, cast: Cast, layout: Layout) -> None:
        super().__init__(layout)
        self._dtype = cast.dtype

    def mean(self, values: Tensor, *, residual: Tensor | None, lost: Tensor | None) -> Averaging:
        num_ranks = self.layout.num_ranks
        total = total_of(values, residual, lost)
        # Divide before rounding, because the sum may exceed the range of the narrow type.
        narrow = narrowed(total, num_ranks, self._dtype)
        if lost is not None:
            # This rank knows only its own rounding. No rank knows the rounding of the sum.
            set_lost(lost, lost.sub_(narrow.to(lost.dtype), alpha=num_ranks))
        summed = yield Sum(narrow)
        return values.copy_(summed)


def narrowed(values: Tensor, divisor: int, dtype: torch.dtype) -> Tensor:
    """Divide values by a number, and round them to bfloat16 or float16."""
    native = library_for(values)
    if native is None:
        return (values / divisor).to(dtype)
    out = torch.empty(values.shape, dtype=dtype, device="cpu")
    is_bf16 = dtype is torch.bfloat16
    run(native.narrow, values.data_ptr(), values.numel(), divisor, is_bf16, out.data_ptr())
    return out
