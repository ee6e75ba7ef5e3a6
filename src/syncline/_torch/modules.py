"""Modules and their state dicts, torch's own DistributedDataParallel, Join, device meshes, and torch.compile.

A module's `_parameters`, `_buffers` and `_modules` are used everywhere. They are as old as torch 1.0, and exempt from
the rule that other packages use no private names of torch. Code that synchronizes is kept out of torch.compile. The
module inside the wrapper is still compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from syncline._torch.lookup import attribute, lookup

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNorm = _BatchNorm
else:
    BatchNorm = lookup("torch.nn.modules.batchnorm:_BatchNorm", "normalize batches over ranks")


_COMPILER = "torch._dynamo"

_is_kept_out = False


def is_compiler_loaded() -> bool:
    """Return whether the compiler has been imported. Importing it takes seconds."""
    return _COMPILER in sys.modules


def import_compiler() -> None:
    """Import the compiler now; torch would do so at an optimizer's first step and for activation checkpoints."""
    importlib.import_module(_COMPILER)


class NotTraced:
    """A method that torch.compile does not trace, though it compiles the functions that the method calls.

    Like `torch.compiler.disable(recursive=False)`, but without an import of the compiler in programs that do not use
    it. The compiler looks the method up before it decides whether to trace it, so the lookup configures the compiler.

    Args:
        function: the method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self._function
        _keep_out_of_compilation()
        return MethodType(self._function, instance)


def _keep_out_of_compilation() -> None:
    """Exclude the functions of this package from compilation, once, if the compiler is loaded."""
    global _is_kept_out
    if _is_kept_out or not is_compiler_loaded():
        return
    # Looked up here, because the lookup waits if another thread is importing the compiler.
    add = lookup(f"{_COMPILER}:trace_rules.add", "keep its own functions out of torch.compile")
    _is_kept_out = True
    add(__name__.partition(".")[0])


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
