"""CPU tensors that say they are on cuda:0: the arithmetic is real. Streams, kernels and NCCL need tests/gpu."""

from __future__ import annotations

import torch
from torch import Tensor


class Fake(Tensor):
    """A tensor with its values on the CPU, which says that it is on cuda:0."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def fake(values: Tensor) -> Tensor:
    return values.as_subclass(Fake)  # type: ignore[arg-type]


class SaysCuda(Tensor):
    """A tensor on the CPU whose `is_cuda` is True. Its `device` is the CPU, so a wrapper can reduce its gradient."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
