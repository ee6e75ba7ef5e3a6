"""Autograd functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Fails"]


class Fails(torch.autograd.Function):
    """Returns its input. Its backward raises KeyError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("in the program's backward")
