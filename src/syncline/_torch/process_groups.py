"""Process groups of torch.distributed: their creation, torch's record of groups, and private methods of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline._torch.lookup import is_there, lookup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
    from torch._C._distributed_c10d import Backend
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    C10dBackend = Backend
else:
    C10dBackend = lookup("torch._C._distributed_c10d:Backend", "serve torch.distributed as a backend")
    AllgatherOptions = lookup(
        "torch._C._distributed_c10d:AllgatherOptions", "gather tensors on an accelerator"
    )
    # Public names, but missing if torch was built without torch.distributed.
    Store = lookup("torch.distributed:Store", "join other ranks")
    HashStore = lookup("torch.distributed:HashStore", "join other ranks")
    TCPStore = lookup("torch.distributed:TCPStore", "join other ranks")
    PrefixStore = lookup("torch.distributed:PrefixStore", "join other ranks")

# ---------------------------------------------------------------------- torch's record of groups

_C10D = "torch.distributed.distributed_c10d"

_world: Any = lookup(f"{_C10D}:_world", "list the process groups")

_new_group = lookup(
    f"{_C10D}:_new_process_group_helper", "create a process group by calls of its members only"
)

_unregister = lookup(
    "torch._C._distributed_c10d:_unregister_process_group", "serve other devices than the CPU"
)

_set_timeout = lookup(f"{_C10D}:_set_pg_timeout", "change the timeout of a process group")

_group_name = lookup(f"{_C10D}:GroupName", "name a process group")

is_living: Callable[[object], bool] = _world.pg_map.__contains__ if is_there(_world) else _world
"""Return whether a process group still exists and was not destroyed.

This is a method of torch's dictionary, which is the same object for the lifetime of the process. It has no wrapper,
because each collective calls it and it must be fast.
"""


def living_groups() -> dict[dist.ProcessGroup, Any]:
    """Return torch's own dictionary, whose keys are the process groups that were not destroyed."""
    groups: dict[dist.ProcessGroup, Any] = _world.pg_map
    return groups


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the operations of a process group."""
    _set_timeout(timeout, group)


def name_groups_anew() -> None:
    """Let torch count its process groups from 0 again. Call this if there is no group.

    torch names a group by this number, and ranks find each other under the name. A group that could not be created has
    used up a number, on some ranks only.
    """
    _world.group_count = 0


def backends_of(group: dist.ProcessGroup) -> str:
    """Return the backends of a process group as `init_process_group` takes them, such as "cpu:gloo,cuda:nccl".

    If all devices have the same backend, its name alone is returned. A group that was created by the long text would
    have no default backend, of which torch warns.
    """
    found = str(_world.pg_backend_config[group])
    names = {part.partition(":")[2] or part for part in found.split(",")}
    return names.pop() if len(names) == 1 else found


def has_record_of(group: dist.ProcessGroup) -> bool:
    """Return whether torch's record contains the backends of a process group."""
    return group in _world.pg_backend_config


def new_group_of(
    global_ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Any,
    name: str,
    timeout: timedelta | None,
    *,
    size: int | None = None,
) -> dist.ProcessGroup:
    """Create a process group. All members of the group must call this function, and no other ranks.

    Args:
        global_ranks: the global ranks of the members. Pass an empty sequence if all global ranks are members.
        rank: the rank of this process among the members.
        backend: the name of the backend, as in `torch.distributed.init_process_group`.
        store: a store that all members can reach and that no other group uses.
        name: the name of the group.
        timeout: the timeout of the group's operations. Pass None for the default of the backend.
        size: the number of members. It is needed only if `global_ranks` is empty.
    """
    group: dist.ProcessGroup
    group, _ = _new_group(
        size or len(global_ranks),
        rank,
        list(global_ranks),
        backend,
        store,
        _group_name(name),
        timeout=timeout,
    )
    return group


def record_ranks(group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
    """Add the global ranks of a new group's members to torch's record."""
    _world.pg_group_ranks[group] = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}


def forget_group(group: dist.ProcessGroup, name: str) -> None:
    """Remove a new group from torch's record. The caller keeps the group, and closes it later."""
    for record in (_world.pg_map, _world.pg_names, _world.pg_backend_config):
        record.pop(group)
    _unregister(_group_name(name))
    _world.tags_to_pg[""].remove(group)
    _world.tags_to_pg.pop(_world.pg_to_tag.pop(group), None)


# ---------------------------------------------------------------------- calls without a public name

# torch is renaming these methods: later versions have `all_gather_single` beside `_allgather_base`.
_ALL_GATHER, _REDUCE_SCATTER = (
    ("_allgather_base", "_reduce_scatter_base")
    if is_there(lookup("torch.distributed:ProcessGroup._allgather_base", "gather tensors"))
    else ("all_gather_single", "reduce_scatter_single")
)


def all_gather_flat(
    group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, options: Any
) -> dist.Work:
    """Start to gather the flat tensor `input` of each rank into the flat tensor `output` on all ranks."""
    work: dist.Work = getattr(group, _ALL_GATHER)(output, input, options)
    return work


def reduce_scatter_flat(
    group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, options: Any
) -> dist.Work:
    """Start to reduce the flat tensor `input` over the ranks. Each rank gets its shard of the result in `output`."""
    work: dist.Work = getattr(group, _REDUCE_SCATTER)(output, input, options)
    return work


def num_calls_started(group: dist.ProcessGroup) -> int | None:
    """Return how many calls this rank has started on a process group; None if the backend does not count them.

    Without this number, errors cannot name a rank that waits in a call of torch.distributed.
    """
    try:
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return None
    return number


# ---------------------------------------------------------------------- backends of a group


def backend_on(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that a process group uses for tensors on a device."""
    return group._get_backend(device)


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether Gloo is a backend of a process group, which may be destroyed already."""
    devices = getattr(group, "_device_types", ())
    return any(getattr(backend_on(group, device), "name", str)() == "gloo" for device in devices)


def timeout_seconds_of(group: dist.ProcessGroup) -> float | None:
    """Return the shortest timeout of a group's backends, in seconds. Return None if no timeout is known."""
    found = []
    for device in getattr(group, "_device_types", ()):
        timeout = timeout_of(getattr(backend_on(group, device), "options", None))
        if timeout is not None and timeout > timedelta(0):
            found.append(timeout.total_seconds())
    return min(found, default=None)


_TIMEOUT = "_timeout"


def timeout_of(options: Any) -> timedelta | None:
    """Return the timeout that a backend's options contain. Return None if they contain no timeout."""
    timeout = getattr(options, _TIMEOUT, None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout_of(options: Any, timeout: timedelta) -> None:
    """Write a timeout into a backend's options."""
    setattr(options, _TIMEOUT, timeout)


def serve_cpu_by(group: dist.ProcessGroup, backend: Any) -> None:
    """Make a process group use a custom backend for tensors on the CPU."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
