"""What an optimizer keeps of a parameter, in memory as the parameter is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["lay_out_like_parameters"]


def lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give each tensor of the state that has its parameter's shape the parameter's strides, too.

    A file has elements in the order of their dimensions. Optimizers begin otherwise, with `zeros_like(parameter)`, and
    their fused kernels go through parameter, gradient and state side by side: beside a channels_last weight, state in
    another order would be that of other elements.

    Args:
        optimizer: of whole parameters, that has just loaded its state.

    Example:
        >>> conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        >>> optimizer = torch.optim.SGD(conv.parameters(), momentum=0.9)
        >>> optimizer.state[conv.weight]["momentum_buffer"] = torch.ones(4, 3, 2, 2)
        >>> lay_out_like_parameters(optimizer)
        >>> optimizer.state[conv.weight]["momentum_buffer"].stride() == conv.weight.stride()
        True
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if type(value) is not Tensor or value.shape != parameter.shape or value.layout != torch.strided:
                continue
            # As `zeros_like` does; that makes something dense of an expanded parameter.
            alike = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
            if alike.stride() != value.stride():
                state[name] = alike.copy_(value)
