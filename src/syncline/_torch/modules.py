"""Modules and their state dicts, torch's own DistributedDataParallel, Join, device meshes, and torch.compile.

Three private names of a module can be used in all packages, because torch has had them since 1.0: `_parameters`,
`_buffers` and `_modules`. torch.compile must not trace the code that synchronizes, but it still compiles the module
inside the wrapper.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel

from syncline._torch.lookup import attribute, lookup

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNorm = _BatchNorm
else:
    BatchNorm = lookup("torch.nn.modules.batchnorm:_BatchNorm", "normalize batches over ranks")


class _TableOfScript(Mapping[str, Any]):
    """The parameters, buffers or submodules of a ScriptModule, whose table is no dictionary."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, key: str) -> Any:
        if key not in self._table:
            raise KeyError(key)
        return self._table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)


def as_mapping(table: Any) -> Mapping[str, Any]:
    """Return a table of a module (`_parameters`, `_buffers` or `_modules`) as a mapping, which stays up to date."""
    return table if isinstance(table, dict) else _TableOfScript(table)


_COMPILER = "torch._dynamo"

_is_kept_out = False


def is_compiler_loaded() -> bool:
    """Return whether the program has imported torch's compiler. The import takes seconds."""
    return _COMPILER in sys.modules


def is_compiler_in_use() -> bool:
    """Return whether the program has passed a function or module to torch.compile. If unknown, return True.

    Optimizers load the compiler, too, so a loaded compiler need not be in use.
    """
    contexts = sys.modules.get(f"{_COMPILER}.eval_frame")
    backends: dict[int, object] = getattr(contexts, "cached_backends", {0: True})
    return contexts is not None and any(
        backends.values()
    )  # code that is not to be compiled has the backend None


def import_compiler() -> None:
    """Import torch's compiler now. Otherwise an optimizer's first step or an activation checkpoint would import it."""
    importlib.import_module(_COMPILER)


class NotTraced:
    """A decorator for a method that torch.compile must not trace. The functions that the method calls are compiled.

    `torch.compiler.disable(recursive=False)` does the same, but it imports the compiler in every program. If the
    compiler is loaded, this decorator configures it when the method is looked up. That is early enough, because the
    compiler looks up a method before it decides whether to trace the method.

    Args:
        function: the function of the method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self._function
        if not _is_kept_out:  # each forward gets here, so the usual case needs no further call
            _keep_out_of_compilation()
        return MethodType(self._function, instance)


def _keep_out_of_compilation() -> None:
    """Exclude the functions of Syncline from compilation, if the compiler is loaded."""
    global _is_kept_out
    if not is_compiler_loaded():
        return
    # The name is looked up here, because the lookup waits if another thread is importing the compiler.
    add = lookup(f"{_COMPILER}:trace_rules.add", "exclude its functions from torch.compile")
    _is_kept_out = True
    add(__name__.partition(".")[0])


_FUNCTIONAL_CALL = lookup("torch.nn.utils.stateless:_functional_call.__code__", "follow changes of a module")


def is_in_functional_call() -> bool:
    """Return whether `torch.func.functional_call` runs in this thread. It replaces parameters for one forward only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


# ---------------------------------------------------------------------- layers

COPIED_WITH_A_LAYER = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""The names of those attributes of a layer that are copied when another layer takes over the attributes.

These attributes are dicts and sets. If the installed torch lacks one of the names, that name has no effect.
"""

# ---------------------------------------------------------------------- the wrapper of torch.compile

_COMPILED = "_orig_mod"

COMPILED_PREFIX = f"{_COMPILED}."
"""The prefix that torch.compile puts before the names of a module's parameters."""


def uncompiled(module: Any) -> Any:
    """Return the module that torch.compile has wrapped. Return any other object unchanged."""
    return getattr(module, _COMPILED, module) if isinstance(module, nn.Module) else module


# ---------------------------------------------------------------------- state dicts

EXTRA_STATE = "_extra_state"
"""The last part of the key under which a state dict stores the result of a module's `get_extra_state`."""

_METADATA = "_metadata"
"""The attribute of a state dict that contains the version of each module's state."""


def metadata_of(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of a state dict, by the path of each module. Return None if there is no metadata."""
    return getattr(state_dict, _METADATA, None)


# ---------------------------------------------------------------------- torch's DistributedDataParallel

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module that lists the parameters and buffers that torch's DistributedDataParallel ignores."""


_ACTIVE = "_active_ddp_module"
"""The attribute of torch's class that holds the wrapper whose forward runs."""

_in_this_thread = threading.local()


class _InForward:
    """The context of the forward of a wrapper. Unlike torch's own, it is right for ranks that are threads.

    torch's context restores what another thread has set. So the attribute could hold the last reference to a wrapper,
    and while Python frees it, the attribute can be read (CPython drops what it has cached about a class too late).
    """

    __slots__ = ("_outer", "_wrapper")

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper

    def __enter__(self) -> None:
        self._outer = getattr(_in_this_thread, "wrapper", None)
        _in_this_thread.wrapper = self._wrapper
        setattr(DistributedDataParallel, _ACTIVE, self._wrapper)

    def __exit__(self, *_: object) -> None:
        _in_this_thread.wrapper = self._outer
        if getattr(DistributedDataParallel, _ACTIVE) is self._wrapper:
            setattr(DistributedDataParallel, _ACTIVE, self._outer)


def while_in_forward_of_ddp(wrapper: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which torch.compile treats the code as part of a wrapper's forward.

    Only in this context does torch.compile split graphs at the buckets, which is faster.
    """
    return _InForward(wrapper) if hasattr(DistributedDataParallel, _ACTIVE) else nullcontext()


def wrapper_in_forward() -> nn.Module | None:
    """Return the innermost DistributedDataParallel whose forward runs now, torch's or ours; None if there is none.

    It is known only for code inside of `while_in_forward_of_ddp`.
    """
    wrapper: nn.Module | None = getattr(DistributedDataParallel, _ACTIVE, None)
    return wrapper


# ---------------------------------------------------------------------- Join

_disabled = lookup(
    "torch.distributed.algorithms.join:_JoinConfig.construct_disabled_join_config", "join uneven inputs"
)

is_in_join: Callable[[Joinable], bool] = attribute("_join_config.enable", "join uneven inputs")
"""Return whether a wrapper is inside a `join` block now."""

_JOIN_CONFIG = "_join_config"


def leave_join(joinable: Joinable) -> None:
    """Mark a wrapper as outside of any `join` block."""
    setattr(joinable, _JOIN_CONFIG, _disabled())


def with_join_disabled(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a wrapper's attributes, in which the wrapper is outside of any `join` block."""
    return {**attributes, _JOIN_CONFIG: _disabled()}


def set_join_configs(join: Join) -> None:
    """Mark the wrappers of a `join` block as inside the block. torch does so only when the `Join` object is created."""
    set_all = lookup(
        "torch.distributed.algorithms.join:Join._set_joinable_configs", "enter a join block again"
    )
    set_all(join)


# ---------------------------------------------------------------------- device meshes

_root_of = attribute("_get_root_mesh", "use one dimension of a device mesh")


def is_slice(mesh: DeviceMesh) -> bool:
    """Return whether a device mesh is a part of a larger mesh, such as its data-parallel dimension."""
    return bool(_root_of(mesh)() != mesh)


def prepare_for_tensor_parallel(module: nn.Module) -> None:
    """Replace the DTensor parameters of a module by this rank's parts, so that they are reduced as plain tensors.

    During a forward of `module`, its layers see DTensors that are made from these parts. torch's own transform
    (`_pre_dp_module_transform`) does the same, but the module loses its parameters in the first forward.
    """
    from torch.distributed.tensor import DTensor  # here, because the import takes long

    wholes: dict[tuple[str, str], DTensor] = {}
    local: dict[DTensor, nn.Parameter] = {}  # a tied parameter stays tied
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in local:
                    local[parameter] = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
                wholes[path, name] = parameter
                part._parameters[name] = local[parameter]
    # Keep the layouts, not the tensors.
    layouts = {
        place: (whole.device_mesh, whole.placements, whole.shape, whole.stride())
        for place, whole in wholes.items()
    }

    def show_wholes(module: nn.Module, _: Any) -> None:
        for (path, name), (mesh, placements, shape, stride) in layouts.items():
            part = module.get_submodule(path)
            mine = part._parameters[name]
            assert mine is not None
            whole = DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)
            # An attribute in `__dict__` comes before a parameter of the same name, and leaves that parameter in place.
            part.__dict__[name] = whole

    def show_parts(module: nn.Module, *_: Any) -> None:
        for path, name in layouts:
            module.get_submodule(path).__dict__.pop(name, None)

    if layouts:
        module.register_forward_pre_hook(show_wholes)
        module.register_forward_hook(show_parts, always_call=True)
