"""How the state of one object is taken, and loaded: a module, wrapped or not, an optimizer, anything else.

What an optimizer keeps of a parameter: in memory as the parameter is, in the types in which it was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.optimizers.contents import keep_saved_types
from syncline.sharded.part import has_sharded_state, sharded_state_of, whole_of

__all__ = [
    "copies",
    "is_wrapped",
    "keep_types",
    "lay_out_like_parameters",
    "load_into",
    "state_of",
    "types_in",
]


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


def copies(one: Any) -> bool:
    """Whether loading into it copies tensors, so that it keeps none of those that it is given.

    Of a wrapped module that holds for the module's own; what synchronization remembers may be kept.
    """
    return has_sharded_state(one) or isinstance(one, nn.Module)


def is_wrapped(state: Any) -> bool:
    """Whether it is the state of a wrapped module: the module's, and what synchronization remembers."""
    return isinstance(state, dict) and state.keys() == {"module", "synchronization"}


def state_of(one: Any) -> Any:
    """The state of something named: of a wrapped module, the module's and what synchronization remembers."""
    if not isinstance(one, DistributedDataParallel):
        return one.state_dict()
    beside = one.sync_state_dict() if isinstance(one, SynchronizedModule) else None
    return {"module": one.module.state_dict(), "synchronization": beside}


def types_in(module: nn.Module, state: Any) -> dict[int, torch.dtype]:
    """In which types the parameters of a module were saved, by `id`."""
    if isinstance(module, DistributedDataParallel):
        module = module.module
    tensors = state["module"] if is_wrapped(state) else state
    if not isinstance(tensors, Mapping):
        return {}  # loading it says what it should be
    found = ((id(parameter), tensors.get(name)) for name, parameter in module.named_parameters())
    return {key: tensor.dtype for key, tensor in found if isinstance(tensor, Tensor)}


def load_into(one: Any, state: Any, types: Mapping[int, torch.dtype]) -> None:
    """Load something that was named.

    Args:
        one: what.
        state: what `state_of` gave, or all shares of it joined (`join_parts`).
        types: see `keep_types`.

    Raises:
        ValueError: it is the state of another optimizer.
    """
    if isinstance(one, Optimizer):
        _load_optimizer(one, state, types)
        return
    sharded = sharded_state_of(one)
    if sharded is not None:
        sharded._load_shards(state, types)
        return
    state = whole_of(state)
    was_wrapped = is_wrapped(state)
    module_state = state["module"] if was_wrapped else state
    if not isinstance(one, DistributedDataParallel):
        one.load_state_dict(module_state)
        return
    one.module.load_state_dict(module_state)
    if isinstance(one, SynchronizedModule) and was_wrapped and state["synchronization"] is not None:
        one.load_sync_state_dict(state["synchronization"])


def _load_optimizer(optimizer: Any, state: Any, types: Mapping[int, torch.dtype]) -> None:
    settings = _settings_of(optimizer)
    sharded = sharded_state_of(optimizer)
    if sharded is not None:
        sharded._load_shards(state, types)
        _check_settings(optimizer, settings)
        return
    state = whole_of(state)
    optimizer.load_state_dict(state)
    _check_settings(optimizer, settings)
    lay_out_like_parameters(optimizer)
    keep_types(optimizer, state, types)


def _settings_of(optimizer: Optimizer) -> set[str]:
    """What the optimizer itself has put into all of its groups, not a schedule."""
    return set.intersection(*({*group} for group in optimizer.param_groups), {*optimizer.defaults})


def _check_settings(optimizer: Optimizer, settings: set[str]) -> None:
    """Raise unless an optimizer still has its settings: torch takes whatever groups it is given, and fails at a step.

    What a newer torch has added is there: its optimizers fill it in when they load (`__setstate__`).
    """
    for group in optimizer.param_groups:
        missing = sorted(settings - group.keys())
        if missing:
            raise ValueError(
                f"what was saved is the state of another optimizer: it lacks {', '.join(missing)}, which "
                f"{type(optimizer).__name__} needs. Make the optimizer as it was; one of your own that has got new "
                "settings since fills them in in __setstate__"
            )
