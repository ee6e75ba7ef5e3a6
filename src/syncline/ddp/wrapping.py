"""The functions that run once, when a module is wrapped, and the forward of a module in lower precision.

These functions check torch's arguments for devices and groups, compare the module between the ranks, and broadcast its
values from rank 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from syncline._torch.modules import is_slice, prepare_for_tensor_parallel, wrapper_in_forward
from syncline._torch.tensors import tree_map_only
from syncline.checks import checked_kind
from syncline.compression import Compression
from syncline.ddp.config import Config
from syncline.ddp.plan import Plan, sizes_of
from syncline.ddp.selection import Selection
from syncline.environment import num_cores
from syncline.equality.fingerprint import fingerprints
from syncline.gradients.bucket_plan import BucketCaps, HostLoad, automatic_caps
from syncline.session.world import world
from syncline.sharded.sharing import one_copy_of, written_elsewhere
from syncline.strategies import Spec
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import agree, describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.user_code import warn_user

_TITLE = "sl.DistributedDataParallel"
"""The title of the comparison between ranks. It lacks the name of the module, which is one of the compared facts."""

_HOST = struct.Struct("<16sII")


def group_of_mesh(
    process_group: dist.ProcessGroup | Transport | None, device_mesh: Any, module: nn.Module
) -> dist.ProcessGroup | Transport | None:
    """Check `process_group` and `device_mesh` by torch's rules, and return the group to synchronize over.

    Returns:
        The group of the mesh, or `process_group` if no mesh is given.

    Raises:
        TypeError: `device_mesh` is not a mesh.
        RuntimeError: both a group and a mesh are given, or the mesh has more than one dimension.
    """
    if device_mesh is None:
        return process_group
    checked_kind("device_mesh", device_mesh, DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh")
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Give only one of the two."
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Give a mesh of one dimension."
        )
    if is_slice(device_mesh):
        prepare_for_tensor_parallel(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def checked_device_ids(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Check `device_ids` and `output_device` by torch's rules, and return them as device indices.

    Returns:
        A list of one index, and the index of the output device. Both are None if inputs are not to be moved.

    Raises:
        TypeError: `device_ids` is not a list of devices, or `output_device` is not a device.
        ValueError: several devices are given, or the module is not on one accelerator.
    """
    is_list = isinstance(device_ids, Sequence) and not isinstance(device_ids, str)
    if device_ids is not None and not (is_list and all(map(_is_device, device_ids))):
        raise TypeError(f"expected device_ids to be None or a list of one device; got {device_ids!r}")
    if output_device is not None and not _is_device(output_device):
        raise TypeError(f"expected output_device to be None or a device; got {output_device!r}")
    if not device_ids and not output_device:  # as in torch, 0 counts as not given, even on CPU
        return None, None
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}. One process uses one "
            "device: give only the device of this rank"
        )
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1 or devices == {torch.device("cpu")}:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules; "
            f"got device_ids={device_ids} and output_device={output_device}, but the parameters of this module are on "
            f"{where}. Leave both arguments out"
        )
    if not device_ids:
        return None, None
    first = _index_of(device_ids[0])
    return [first], first if output_device is None else _index_of(output_device)


def _is_device(device: object) -> bool:
    return isinstance(device, int | str | torch.device) and not isinstance(device, bool)


def _index_of(device: int | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class MixedPrecision:
    """A callable that runs the forward of a module in lower precision, on low-precision copies of the parameters.

    The parameters themselves keep their precision, and autograd casts the gradients back. Optimizers, clipping and
    checkpoints therefore use full precision.

    Args:
        module: the module, whose buffers get the lower precision now.
        config: torch's `_MixedPrecision`. A dtype of None casts nothing.
        ignored: the names of the parameters that are not cast.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str] = ()) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        self._ignored = frozenset(ignored)
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(config.buffer_dtype)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module in the lower precision."""
        dtype = self._dtype
        if dtype is None:
            return module(*inputs, **kwargs)

        def lower(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        inputs, kwargs = tree_map_only(Tensor, lower, (inputs, kwargs))
        named = module.named_parameters()
        lowered = {name: lower(parameter) for name, parameter in named if name not in self._ignored}
        return torch.func.functional_call(module, lowered, inputs, kwargs)


class Hosts(NamedTuple):
    """The hosts on which the ranks run, and the load of each host."""

    loads: list[HostLoad]
    """The load of each host, in the order of the hashes of the hosts' names."""
    of_rank: tuple[int, ...]
    """For each rank, the index of its host. The host of rank 0 has index 0, the next new host has index 1, and so on.
    These are not indices of `loads`."""

    def caps_for(
        self, chosen: Selection, transport: Transport, compression: Compression | None
    ) -> BucketCaps:
        """Return the default caps of the buckets for these hosts, tensors and transport, and this compression."""
        tensors = [tensor for _, tensor in chosen.reduced]
        return automatic_caps(
            self.loads,
            device_type=tensors[0].device.type,
            reduces_in_place=transport.reduces_in_place,
            gradient_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            sends_little=compression is not None and compression.sends_little,
        )


def gather_hosts(transport: Transport) -> Hosts:
    """Gather from each rank its host, its number of cores and its number of threads. A collective call.

    Returns:
        The hosts, the same on every rank.
    """
    host = hashlib.sha256(world().host.encode()).digest()[:16]
    mine = _HOST.pack(host, num_cores(), torch.get_num_threads())
    rows = [_HOST.unpack_from(row) for row in exchange(transport, _TITLE, [], payload=mine)]
    hosts = []
    for name in sorted({row[0] for row in rows}):
        here = [row for row in rows if row[0] == name]
        hosts.append(
            HostLoad(
                num_ranks=len(here),
                num_cores=min(row[1] for row in here),
                num_threads_per_rank=max(row[2] for row in here),
            )
        )
    names = list(dict.fromkeys(row[0] for row in rows))
    return Hosts(hosts, tuple(names.index(row[0]) for row in rows))


@contextmanager
def refusals(transport: Transport) -> Iterator[None]:
    """Make all ranks raise an error if this rank raises one inside of this context.

    This rank sends its error in the collective call that the other ranks make in `gather_hosts`, so that no rank waits
    for this rank forever.

    Raises:
        TypeError, ValueError, RuntimeError: an error with the text of the original error, on every rank. In a world of
            one rank, the original error is raised.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if transport.size > 1:
            exchange(transport, _TITLE, [], fault=error)
        raise


def first_plan(
    config: Config, title: str, chosen: Selection, transport: Transport, hosts: Hosts
) -> tuple[Plan, Spec]:
    """Return the plan of a module before users register anything, and the facts on which its strategy depends.

    Args:
        config: the configuration of the wrapper.
        title: the name of the module's class.
        chosen: the tensors that are synchronized.
        transport: the transport between the ranks.
        hosts: the hosts on which the ranks run.
    """
    strategy = config.strategy
    spec = Spec(
        rank=transport.rank,
        num_ranks=transport.size,
        hosts=hosts.of_rank,
        sizes_numel=tuple(parameter.numel() for _, parameter in chosen.reduced),
    )
    plan = Plan(
        config=config,
        module=title,
        transport=transport.name,
        shares_memory=transport.reduces_in_place,
        rank=transport.rank,
        num_ranks=transport.size,
        num_hosts=len(hosts.loads),
        sizes=sizes_of(chosen),
        rules=strategy.rules(spec) if strategy.drifts else None,
        workers=strategy.workers(spec),
    )
    return plan, spec


def agree_on_module(
    plan: Plan,
    chosen: Selection,
    transport: Transport,
    *,
    new_values: Sequence[str] = (),
    remedy: str = "Build the same module with the same arguments on every rank, then wrap it.",
) -> None:
    """Compare the module and its configuration between the ranks. A collective call.

    Buffers that are never sent are not compared.

    Args:
        plan: the plan of the module.
        chosen: the tensors that are synchronized.
        transport: the transport between the ranks.
        new_values: further lines to compare, as `describe_new_values` returns them.
        remedy: the last sentence of the error, which says what to do.

    Raises:
        ContractMismatch: the module or its configuration differs between ranks. The text is the same on every rank.
    """
    lines = [
        *plan.compared(),
        *(f"ignored: {name}" for name in chosen.ignored),
        *describe_tensors(chosen.parameters, kind="parameter"),
        *describe_tensors(chosen.buffers if plan.config.sends_buffers else (), kind="buffer"),
        *new_values,
    ]
    agree(transport, _TITLE, lines, remedy=remedy)


def check_one_copy(module: nn.Module, transport: Transport) -> None:
    """Check that no rank has written to shared parameters of a module outside of `sl.write_shared`.

    If the ranks share the parameters, this is a collective call. Otherwise the call does nothing.

    Raises:
        SynclineError: a rank has written to shared parameters. Every rank raises the error.
    """
    copy = one_copy_of(module)
    if copy is not None:
        names = copy.written_here()
        fault = written_elsewhere(f": {names}") if names else None
        exchange(transport, f"DistributedDataParallel({type(module).__name__})", [], fault=fault)


def broadcast_values(chosen: Selection, transport: Transport, *, src: int, buffers: bool) -> None:
    """Broadcast parameters from rank `src`, and buffers too if `buffers` is True. A collective call."""
    tensors = [p for _, p in chosen.parameters] + ([b for _, b in chosen.buffers] if buffers else [])
    TensorBroadcaster(tensors, transport).start(src).wait()


def describe_new_values(chosen: Selection, before: Selection) -> list[str]:
    """Return a line for each parameter that is in `chosen`, but not in `before`: its name, and a hash of its values."""
    known = {id(parameter) for _, parameter in before.parameters}
    new = [(name, p.detach()) for name, p in chosen.parameters if id(p) not in known]
    numbers = fingerprints([tensor for _, tensor in new])
    return [f"values of {name}: {number:016x}" for (name, _), number in zip(new, numbers, strict=True)]


def warn_if_wrapped_twice(module: nn.Module, reduced: Sequence[Tensor]) -> None:
    """Warn if the forward of `module` runs inside the forward of another wrapper that reduces the same gradients.

    Frameworks such as Accelerate wrap every given module, even if it is wrapped already. TorchRec wraps parts
    on purpose, and lets the outer wrapper ignore their parameters.

    Args:
        module: the module of this wrapper.
        reduced: the parameters whose gradients this wrapper reduces.
    """
    outer = wrapper_in_forward()
    if outer is None or outer.module is module or not any(inner is module for inner in outer.modules()):
        return
    ignored: Collection[str] = outer.parameters_to_ignore  # type: ignore[assignment]
    whole: nn.Module = outer.module  # type: ignore[assignment]
    own = {id(parameter) for parameter in reduced}
    if not any(
        id(p) in own and p.requires_grad and name not in ignored for name, p in whole.named_parameters()
    ):
        return
    kind = type(outer)
    warn_user(
        f"this {type(module).__name__} is wrapped twice: its sl.DistributedDataParallel is inside of another wrapper "
        f"({kind.__module__.partition('.')[0]}'s {kind.__name__}). The gradients are reduced twice, and strategies "
        "have no effect. Remove one of the wrappers. If a framework added the outer one, do not hand the wrapped "
        "module to it: with Accelerate, pass accelerator.prepare_model(model, evaluation_mode=True) to "
        "sl.DistributedDataParallel, and prepare only optimizers and data loaders"
    )


def are_of_the_bare_module(keys: Sequence[str], module: nn.Module) -> bool:
    """Return whether the keys of a state_dict belong to the bare module, and so lack the wrapper's prefix `module.`.

    If the bare module has a submodule named `module`, its own keys can have that prefix, too. Then the function counts
    the keys that the bare module has, first unchanged, then without the prefix. The keys belong to the bare module if
    the first count is larger.

    Examples:
        >>> net = nn.Sequential()
        >>> net.module = nn.Linear(1, 1)  # the keys of this bare module look like a wrapper's
        >>> are_of_the_bare_module(["module.weight"], net), are_of_the_bare_module(["module.module.weight"], net)
        (True, False)
    """
    if not any(key.startswith("module.") for key in keys):
        return True
    if "module" not in module._modules:
        return False
    own = set(module.state_dict(keep_vars=True))
    num_bare = sum(key in own for key in keys)
    return num_bare > sum(key.removeprefix("module.") in own for key in keys if key.startswith("module."))
