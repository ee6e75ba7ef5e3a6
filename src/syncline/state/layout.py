"""What an optimizer keeps of a parameter: in memory as the parameter is, in the types in which it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.sync.optimizers import keep_saved_types

__all__ = ["keep_types", "lay_out_like_parameters"]


def keep_types(optimizer: Optimizer, saved: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
    """Give state the types in which it was saved, where its parameter has the type that it had then.

    torch turns floating-point state into its parameter's type when it loads it, so that moments kept in float32 beside
    weights in bfloat16 would be rounded, and a run would not go on as it was.

    Args:
        optimizer: of whole parameters, that has just loaded its state.
        saved: what it has loaded, as its `state_dict()` gave it.
        types: in which parameters were saved, by `id`; others are left alone.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], momentum=0.9)
        >>> optimizer.state[weight]["momentum_buffer"] = torch.tensor([0.1, 0.2])
        >>> saved = optimizer.state_dict()
        >>> optimizer.load_state_dict(saved)
        >>> keep_types(optimizer, saved, {id(weight): torch.bfloat16})
        >>> optimizer.state[weight]["momentum_buffer"].dtype
        torch.float32
    """
    if not {"state", "param_groups"} <= saved.keys():
        return  # its class saves in a form of its own
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for parameter, key in zip(parameters, keys, strict=False):
        state, before = optimizer.state.get(parameter), saved["state"].get(key)
        if types.get(id(parameter)) != parameter.dtype or not (
            isinstance(state, dict) and isinstance(before, dict)
        ):
            continue
        keep_saved_types(state, before)


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
