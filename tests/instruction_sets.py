"""Native forms of encodings, run on one instruction set, and what is compared of their results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from syncline.compression import kernels
from syncline.native import library

__all__ = ["bits", "instruction_sets", "on"]


def instruction_sets() -> list[int]:
    """The numbers of those that this processor has."""
    return [isa for isa in range(3) if library().isa(isa) is not None]


@contextmanager
def on(isa: int, num_threads: int = 1) -> Iterator[None]:
    """Run the native form on one instruction set, and with a number of threads."""
    with (
        patch.object(kernels, "_BEST_ISA", isa),
        patch.object(kernels.torch, "get_num_threads", lambda: num_threads),
    ):
        yield


def bits(tensor: Tensor | None) -> Tensor:
    """The bits of each number; of a NaN, only that it is one."""
    if tensor is None:
        return torch.zeros(0)
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)
