"""The steps that run once, when a module is wrapped: the ranks agree on it, and broadcast its first values."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from syncline._torch.modules import is_slice, prepare_for_tensor_parallel
from syncline.checks import checked_kind
from syncline.ddp.plan import Plan
from syncline.ddp.selection import Selection
from syncline.equality.fingerprint import fingerprints
from syncline.gradients.bucket_plan import BucketCaps, HostLoad, automatic_caps
from syncline.session.world import world
from syncline.strategies import Spec
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import agree, describe_tensors, exchange
from syncline.transport.base import Transport

_TITLE = "sl.DistributedDataParallel"
"""The title under which ranks agree. The module's name is in the lines that they compare."""

_HOST = struct.Struct("<16sII")


def group_of_mesh(
    process_group: dist.ProcessGroup | Transport | None, device_mesh: Any, module: nn.Module
) -> dist.ProcessGroup | Transport | None:
    """Return the group of a mesh, by torch's rules; `process_group` if there is no mesh."""
    if device_mesh is None:
        return process_group
    checked_kind("device_mesh", device_mesh, DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh")
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if is_slice(device_mesh):
        prepare_for_tensor_parallel(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


class Hosts(NamedTuple):
    """The hosts of the ranks."""

    loads: list[HostLoad]
    """The load of each host, sorted by a hash of the host's name."""
    of_rank: tuple[int, ...]
    """The number of each rank's host. Hosts are numbered in the order in which they first occur."""

    def caps_for(self, chosen: Selection, transport: Transport) -> BucketCaps:
        """Return the caps of buckets to use if the user gave none."""
        device_type = [*chosen.trained, *chosen.delayed][0][1].device.type
        return automatic_caps(
            self.loads, device_type=device_type, reduces_in_place=transport.reduces_in_place
        )


def gather_hosts(transport: Transport) -> Hosts:
    """Return the hosts of all ranks and the load on their cores, the same on every rank. A collective call."""
    host = hashlib.sha256(world().host.encode()).digest()[:16]
    mine = _HOST.pack(host, len(os.sched_getaffinity(0)), torch.get_num_threads())
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
    """Raise an error about this rank's arguments, from inside of this context, on all ranks.

    The error is sent in place of this rank's part in `gather_hosts`, so that no other rank waits.

    Raises:
        TypeError, ValueError, SynclineError: the text of the error, on every rank. The class is SynclineError if the
            error is neither of the other two. With one rank, the error itself is raised.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if transport.size > 1:
            exchange(transport, _TITLE, [], fault=error)
        raise


def spec_of(chosen: Selection, transport: Transport, hosts: Hosts) -> Spec:
    """Return the situation, which is passed to the strategy: ranks, hosts and parameter sizes."""
    return Spec(
        rank=transport.rank,
        num_ranks=transport.size,
        hosts=hosts.of_rank,
        sizes_numel=tuple(parameter.numel() for _, parameter in (*chosen.trained, *chosen.delayed)),
    )


def agree_on_module(
    plan: Plan,
    chosen: Selection,
    transport: Transport,
    *,
    new_values: Sequence[str] = (),
    remedy: str = "Build the same module with the same arguments on every rank, then wrap it.",
) -> None:
    """Check that every rank wraps the same module with the same configuration. A collective call.

    Args:
        plan: the facts about the module.
        chosen: the tensors that take part.
        transport: connects the ranks.
        new_values: further lines to compare, from `describe_new_values`.
        remedy: advice to the user, for the error.

    Raises:
        ContractMismatch: the ranks differ. The text is the same on every rank.
    """
    lines = [
        *plan.compared(),
        *(f"ignored: {name}" for name in chosen.ignored),
        *describe_tensors(chosen.parameters, kind="parameter"),
        *describe_tensors(chosen.buffers, kind="buffer"),
        *new_values,
    ]
    agree(transport, _TITLE, lines, remedy=remedy)


def broadcast_values(chosen: Selection, transport: Transport, *, src: int, buffers: bool) -> None:
    """Broadcast parameters from rank `src`, and buffers too if `buffers` is True. A collective call."""
    tensors = [p for _, p in chosen.parameters] + ([b for _, b in chosen.buffers] if buffers else [])
    TensorBroadcaster([t.detach() for t in tensors], transport).start(src).wait()


def describe_new_values(chosen: Selection, before: Selection) -> list[str]:
    """Return one line for each tensor that is not in `before`, with a fingerprint of its values."""
    known = {id(tensor) for _, tensor in (*before.parameters, *before.buffers)}
    new = [(name, t.detach()) for name, t in (*chosen.parameters, *chosen.buffers) if id(t) not in known]
    numbers = fingerprints([tensor for _, tensor in new])
    return [f"values of {name}: {number:016x}" for (name, _), number in zip(new, numbers, strict=True)]


def are_of_the_bare_module(keys: Sequence[str], module: nn.Module) -> bool:
    """Return whether the keys of a state_dict are those of the bare module, without the wrapper's prefix `module.`.

    Example:
        >>> net = nn.Sequential()
        >>> net.module = nn.Linear(1, 1)  # its own keys look like a wrapper's
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
