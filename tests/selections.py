"""Values among which the largest are hard to find. The tests of both forms of the selection use them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KINDS", "values_of_kind"]

KINDS = ("normal", "zeros", "few", "ties", "ramp", "all in the sample")


def values_of_kind(kind: str, numel: int) -> Tensor:
    """Values of one of `KINDS`; of any other kind, normal values."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    if kind == "zeros":
        values.zero_()
    elif kind == "few":  # fewer than are asked for are not zero
        values[1000:] = 0
    elif kind == "ties":
        values = values.sign() * (values.abs() > 2)
    elif kind == "ramp":  # all of the largest lie together
        values = torch.arange(numel).float()
    elif kind == "all in the sample":  # so it has seen many more of them than there are
        values[:: numel // 2**14] += 1000
    return values
