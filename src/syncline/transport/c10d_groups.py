"""Process groups of torch: create and destroy them, the options of their calls, and the dtypes that they can move.

Gloo and NCCL lack int16 and most unsigned types, and Gloo lacks complex numbers in some operations. The maximum and
minimum of floats with a NaN depend on the backend: Gloo keeps or drops the NaN, depending on the rank that has it. So
floats are sent as integers in the same order, in which NaN comes last or first, and the result is NaN on every engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import (
    AllgatherOptions,
    PrefixStore,
    is_living,
    new_group_of,
    record_ranks,
    timeout_seconds_of,
)
from syncline.transport.base import ReduceOp

Back = Callable[[Tensor], Tensor]
"""A function that converts the received tensor back to values."""

_MOVED_AS_THEY_ARE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}


def movable(tensor: Tensor) -> Tensor:
    """Return a view of the same memory in a dtype that every backend moves."""
    if tensor.dtype in _MOVED_AS_THEY_ARE:
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().view(-1).view(torch.uint8)


def reducible(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, Back | None]:
    """Return `tensor` in a dtype that every backend reduces correctly, and a function that converts the result back.

    The function is None if the returned tensor uses the memory of `tensor`.
    """
    if tensor.dtype is torch.int16:
        return tensor.to(torch.int32), lambda result: result
    if op in ("max", "min") and tensor.is_floating_point():
        return _in_order(tensor.detach(), op), _out_of_order
    wire = tensor.detach() if tensor.requires_grad else tensor
    if op == "mean" and wire.device.type == "cpu":
        wire = _alias(wire)
    return (torch.view_as_real(wire) if wire.is_complex() else wire), None


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory that is no inference tensor, because Gloo divides a mean in place."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def put_back(target: Tensor, result: Tensor, back: Back | None) -> Callable[[], object] | None:
    """Return a function that copies `result` to `target` after the operation; None if they have the same memory."""
    return None if back is None else lambda: fill(target, back(result))


# Inference tensors may be written in inference mode only, in which all other tensors may be written as well. It is no
# use to ask for `is_inference`: it is False for `.data` of an inference tensor, but a view of that cannot be written.


@torch.inference_mode()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy `values` to `target`, in the order of the memory."""
    target.detach().view(-1).copy_(values.view(-1))


@torch.inference_mode()
def divide(target: Tensor, size: int) -> None:
    """Divide `target` in place."""
    target.detach().div_(size)


def _in_order(values: Tensor, op: ReduceOp) -> Tensor:
    """Return floats as integers in the same order.

    The bits of negative numbers are inverted, except for the sign.
    """
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    nan = torch.full((), torch.nan, dtype=wide.dtype, device=wide.device)
    nan = torch.copysign(nan, torch.ones_like(nan) if op == "max" else -torch.ones_like(nan))
    integers = torch.int64 if wide.dtype is torch.float64 else torch.int32
    return _flipped(torch.where(wide.isnan(), nan, wide).view(integers))


def _out_of_order(ordered: Tensor) -> Tensor:
    """Return the floats for integers from `_in_order`."""
    return _flipped(ordered).view(torch.float64 if ordered.dtype is torch.int64 else torch.float32)


def _flipped(bits: Tensor) -> Tensor:
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

_FALLBACK_TIMEOUT_SECONDS = 1800.0
"""The timeout of a group whose backend does not report its timeout."""

_DESTROY_SECONDS = 1.0
"""How long a rank waits for the thread that destroys a group."""


class CallOptions:
    """The options of all calls of one process group, built in advance for the hot path.

    Args:
        size: number of ranks.
        timeout_seconds: the timeout of Gloo itself.
        control_device: the device on which barriers run.
        has_mean: whether the backend can compute a mean. If not, the options for "mean" compute the sum.
    """

    def __init__(
        self, size: int, timeout_seconds: float, control_device: torch.device, *, has_mean: bool
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.all_reduce: dict[str, dist.AllreduceOptions] = {}
        self.reduce_scatter: dict[str, dist.ReduceScatterOptions] = {}
        for op, torch_op in _REDUCE_OPS.items():
            all_reduce = self.all_reduce[op] = dist.AllreduceOptions()
            reduce_scatter = self.reduce_scatter[op] = dist.ReduceScatterOptions()
            reduce_op = dist.ReduceOp(torch_op if op != "mean" or has_mean else dist.ReduceOp.SUM)
            all_reduce.reduceOp = reduce_scatter.reduceOp = reduce_op
            all_reduce.timeout = reduce_scatter.timeout = timeout
        self.all_gather = AllgatherOptions()
        self.all_gather.timeout = timeout
        self.barrier = dist.BarrierOptions()
        self.barrier.timeout = timeout
        self.barrier.device = control_device
        if control_device.type != "cpu":
            self.barrier.device_ids = [control_device.index]
        self.broadcast = []
        """The options of broadcasts, by source rank."""
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
    """Create a process group of some of the ranks of `parent`. Only these ranks make the call.

    torch.distributed.new_group(use_local_synchronization=True) derives a group's name from the number of groups that a
    rank has been in. If the ranks have been in different numbers of groups, they would wait for each other in vain, and
    a group created after a destroyed group would find the old addresses in the store. So the name is random here.

    Args:
        parent: a group of this rank.
        ranks: the members of the new group as ranks of `parent`, including this rank.
        token: eight random bytes, the same on all of these ranks.
        backends: the backends by device type.
        timeout_seconds: the timeout of the group.

    Raises:
        RuntimeError: a rank could not be connected.
    """
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    backend = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    if set(backends.values()) == {"gloo"}:
        backend = (
            "gloo"  # one backend for all devices, because torch warns about a group without a default backend
        )
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
    """Destroy the only group in a list, and clear the list. No other reference to the group may exist.

    The group's destructor waits for operations under way, and so for ranks that may never join these operations. So the
    destructor runs on another thread, for which this thread waits only a short time.
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
    """Return the timeout of a group's operations."""
    return timeout_seconds_of(group) or _FALLBACK_TIMEOUT_SECONDS


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends by device type, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = str(dist.get_backend_config(group))
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}
