"""torch's process groups: the options of their calls, and how they are created and destroyed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline._torch.process_groups import (
    AllgatherOptions,
    PrefixStore,
    is_living,
    new_group_of,
    record_ranks,
    timeout_seconds_of,
)

__all__ = ["CallOptions", "backends_of", "destroy", "group_timeout_seconds", "new_group"]


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

_FALLBACK_TIMEOUT_SECONDS = 1800.0

_DESTROY_SECONDS = 1.0


class CallOptions:
    """The options of all calls of one process group, built in advance for the hot path.

    Args:
        size: number of ranks.
        timeout_seconds: becomes Gloo's own timeout.
        control_device: the device of barriers.
        has_mean: whether the backend has a mean. If it has none, its options for "mean" compute the sum.
    """

    def __init__(
        self, size: int, timeout_seconds: float, control_device: torch.device, *, has_mean: bool
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.all_reduce: dict[str, dist.AllreduceOptions] = {}
        self.reduce_scatter: dict[str, dist.ReduceScatterOptions] = {}
        for op, torch_op in _REDUCE_OPS.items():
            all_reduce, reduce_scatter = dist.AllreduceOptions(), dist.ReduceScatterOptions()
            reduce_op = dist.ReduceOp(torch_op if op != "mean" or has_mean else dist.ReduceOp.SUM)
            all_reduce.reduceOp = reduce_scatter.reduceOp = reduce_op
            all_reduce.timeout = reduce_scatter.timeout = timeout
            self.all_reduce[op] = all_reduce
            self.reduce_scatter[op] = reduce_scatter
        self.all_gather = AllgatherOptions()
        self.all_gather.timeout = timeout
        self.barrier = dist.BarrierOptions()
        self.barrier.timeout = timeout
        self.barrier.device = control_device
        if control_device.type != "cpu":
            self.barrier.device_ids = [control_device.index]
        self.broadcast = []
        """By source."""
        for src in range(size):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = src, 0, timeout
            self.broadcast.append(options)


def new_group(
    parent: dist.ProcessGroup,
    ranks: list[int],
    token: bytes,
    *,
    backends: Mapping[str, str],
    timeout_seconds: float,
) -> dist.ProcessGroup:
    """Create a process group of some of the ranks of `parent`; only its members make the call.

    torch.distributed.new_group(use_local_synchronization=True) is meant for this, but derives a group's name from the
    number of groups that a rank has been in. Ranks that have been in different numbers of groups would wait for each
    other in vain, and a group created after a destroyed one would find the old addresses in the store. So the name is
    random here.

    Args:
        parent: a group of this rank.
        ranks: the ranks in `parent` that take part, including this one.
        token: eight random bytes, the same on all of these ranks.
        backends: the backend by device type.
        timeout_seconds: the timeout of the group.

    Raises:
        RuntimeError: a rank could not be connected.
    """
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    backend = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    if set(backends.values()) == {"gloo"}:
        backend = "gloo"  # one for all devices, because torch warns about a group without a default
    name = f"syncline-{token[:8].hex()}"
    group = new_group_of(
        global_ranks,
        ranks.index(dist.get_rank(parent)),
        backend,
        PrefixStore(name, parent.get_group_store()),
        name,
        timedelta(seconds=timeout_seconds),
    )
    record_ranks(group, global_ranks)
    return group


def destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroy a group that we created and to which the caller keeps no reference.

    The group's destructor waits for operations under way, and so for ranks that may never join them. It runs on another
    thread, because this thread may only be freeing a wrapper.
    """

    def destroy() -> None:
        if is_living(groups[0]):
            dist.destroy_process_group(groups[0])
        groups.clear()

    thread = threading.Thread(target=destroy, name="syncline destroys a group", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        destroy()
    else:
        thread.join(_DESTROY_SECONDS)


def group_timeout_seconds(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group."""
    return timeout_seconds_of(group) or _FALLBACK_TIMEOUT_SECONDS


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends by device type, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = str(dist.get_backend_config(group))
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}
