"""Modules and their state dicts, torch's own DistributedDataParallel, Join, and device meshes.

A module's `_parameters`, `_buffers` and `_modules` are used everywhere. They are as old as torch 1.0, and exempt from
the rule that other packages use no private names of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from syncline._torch.lookup import attribute, lookup

__all__ = [
    "COMPILED_PREFIX",
    "COPIED_WITH_A_LAYER",
    "EXTRA_STATE",
    "IGNORED_BY_DDP",
    "BatchNorm",
    "is_in_join",
    "is_slice",
    "leave_join",
    "metadata_of",
    "prepare_for_tensor_parallel",
    "set_join_configs",
    "set_metadata",
    "uncompiled",
    "while_in_forward_of_ddp",
    "with_join_disabled",
]


if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = lookup("torch.nn.modules.batchnorm:_BatchNorm", "normalize batches over ranks")

# ---------------------------------------------------------------------- layers

COPIED_WITH_A_LAYER = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""The dictionaries and sets of a module that are copied with it. A name that torch drops is no longer copied."""

# ---------------------------------------------------------------------- the wrapper of torch.compile

_COMPILED = "_orig_mod"

COMPILED_PREFIX = f"{_COMPILED}."
"""The prefix of parameter names in a compiled module."""


def uncompiled(module: Any) -> Any:
    """Return the module that torch.compile has wrapped; any other object unchanged."""
    return getattr(module, _COMPILED, module) if isinstance(module, nn.Module) else module


# ---------------------------------------------------------------------- state dicts

EXTRA_STATE = "_extra_state"
"""The end of the key under which the result of `get_extra_state` is stored. It is part of torch's file format."""

_METADATA = "_metadata"
"""The attribute of a state dict that holds the version of each module's state."""


def metadata_of(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of a state dict, by the path of each module; None if it has none."""
    return getattr(state_dict, _METADATA, None)


def set_metadata(state_dict: Any, metadata: dict[str, Any]) -> None:
    """Set the metadata of a state dict."""
    setattr(state_dict, _METADATA, metadata)


# ---------------------------------------------------------------------- torch's DistributedDataParallel

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names that torch's class ignores. If it is not set, none are ignored."""


def while_in_forward_of_ddp(wrapper: nn.Module) -> AbstractContextManager[Any]:
    """Return a context that marks, for torch.compile, that a wrapper's forward is running.

    Without it graphs are not split at the buckets, which is slower.
    """
    make = getattr(wrapper, "_inside_ddp_forward", nullcontext)
    context: AbstractContextManager[Any] = make()
    return context


# ---------------------------------------------------------------------- Join

_disabled = lookup(
    "torch.distributed.algorithms.join:_JoinConfig.construct_disabled_join_config", "join uneven inputs"
)

is_in_join: Callable[[Joinable], bool] = attribute("_join_config.enable", "join uneven inputs")
"""Return whether a wrapper is used inside a `join` block."""

_JOIN_CONFIG = "_join_config"


def leave_join(joinable: Joinable) -> None:
    """Mark a wrapper as outside of any `join` block."""
    setattr(joinable, _JOIN_CONFIG, _disabled())


def with_join_disabled(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the attributes of a wrapper, with the values that they have outside any `join` block."""
    return {**attributes, _JOIN_CONFIG: _disabled()}


def set_join_configs(join: Join) -> None:
    """Mark the wrappers of a `join` block as inside it. torch does so only when the block is created."""
    set_all = lookup(
        "torch.distributed.algorithms.join:Join._set_joinable_configs", "enter a join block again"
    )
    set_all(join)


# ---------------------------------------------------------------------- device meshes

_root_of = attribute("_get_root_mesh", "use one dimension of a device mesh")


def is_slice(mesh: DeviceMesh) -> bool:
    """Return whether a mesh is one dimension of a larger one, with tensor parallelism over the others."""
    return bool(_root_of(mesh)() != mesh)


def prepare_for_tensor_parallel(module: nn.Module) -> None:
    """Let a module's DTensor parameters be reduced as plain tensors."""
    # Looked up here, because the lookup imports DTensor.
    transform = lookup(
        "torch.distributed.tensor.parallel.ddp:_pre_dp_module_transform",
        "combine tensor and data parallelism",
    )
    transform(module)
