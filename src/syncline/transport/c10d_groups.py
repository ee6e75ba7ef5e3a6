"""Functions that create and destroy torch process groups, and that convert tensors to what all backends support.

Gloo and NCCL lack int16 and most unsigned types, and Gloo lacks complex numbers in some operations.

If an input contains NaN, the results of "max" and "min" depend on the backend. In Gloo, they also depend on which rank
has the NaN. So for "max" and "min", floats are converted to integers that have the same order. In this order, NaN is
larger than all numbers for "max", and smaller than all numbers for "min". So the result is NaN on every engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import (
    AllgatherOptions,
    Gather,
    PrefixStore,
    addresses_gathered,
    is_living,
    new_group_of,
    record_ranks,
)
from syncline.liveness.at_exit import AT_EXIT
from syncline.transport.base import ReduceOp
from syncline.transport.work import CombinedWork, Work

Back = Callable[[Tensor], Tensor]
"""A function that converts a reduced tensor back from the dtype in which it was sent."""

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
    """Return a tensor in the same memory as `tensor`, with a dtype that every backend can send."""
    if tensor.dtype in _MOVED_AS_THEY_ARE:
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().view(-1).view(torch.uint8)


def reducible(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, Back | None]:
    """Convert `tensor` to a dtype that every backend reduces correctly.

    Returns:
        The converted tensor, and a function that converts the reduced tensor back. The function is None if the
        converted tensor is in the memory of `tensor`, so that nothing has to be copied back.
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
    """Return a tensor that shares the memory of `tensor`, but is not an inference tensor.

    Gloo divides a mean in place, which torch forbids for inference tensors.
    """
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def put_back(target: Tensor, result: Tensor, back: Back | None) -> Callable[[], object] | None:
    """Return a function that converts `result` back and copies it to `target`.

    Returns None if `back` is None, because `result` is then in the memory of `target` already.
    """
    return None if back is None else lambda: fill(target, back(result))


# Torch allows writes to an inference tensor only in inference mode, which allows writes to all other tensors as well. A
# check of `is_inference` is no alternative: it is False for `.data` of an inference tensor, although a write to a view
# of `.data` raises.


@torch.inference_mode()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy the elements of `values` to `target` in the order in which they lie in memory. The shapes can differ."""
    target.detach().view(-1).copy_(values.view(-1))


@torch.inference_mode()
def divide(target: Tensor, size: int) -> None:
    """Divide `target` by `size`, in place."""
    target.detach().div_(size)


def through_host(output: Tensor, input: Tensor, start: Callable[[Tensor, Tensor], Work]) -> Work:
    """Start an operation on copies in the memory of the host. `wait` of the returned work then copies the result back.

    Gloo in torch lacks some operations for tensors on a GPU, such as `send`. For tensors on the host it has all of
    them, and a wait for them can check for failed peers.

    Args:
        output: the tensor on a GPU into which the operation writes.
        input: the tensor on a GPU that the operation reads. It may be the same object as `output`.
        start: a function that starts the operation on the copies of `output` and `input`.
    """
    sent = host_copy(input)
    result = sent if output is input else torch.empty(output.numel(), dtype=output.dtype, device="cpu")
    return CombinedWork([(start(result, sent), lambda: fill(output, result))])


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to a flat tensor in the memory of the host."""
    copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    fill(copy, tensor)
    return copy


def _in_order(values: Tensor, op: ReduceOp) -> Tensor:
    """Map floats to integers that have the same order, so that they can be compared instead of the floats.

    The integers have the bits of the floats. For negative floats, all bits except the sign bit are inverted. NaN
    becomes larger than all numbers if `op` is "max", and smaller than all numbers if `op` is "min".
    """
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    nan = torch.full((), torch.nan, dtype=wide.dtype, device=wide.device)
    nan = torch.copysign(nan, torch.ones_like(nan) if op == "max" else -torch.ones_like(nan))
    integers = torch.int64 if wide.dtype is torch.float64 else torch.int32
    return _flipped(torch.where(wide.isnan(), nan, wide).view(integers))


def _out_of_order(ordered: Tensor) -> Tensor:
    """Return the floats that `_in_order` has mapped to these integers."""
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

_DESTROY_SECONDS = 1.0
"""How long `destroy` waits for the thread that destroys a process group."""


class CallOptions:
    """The option objects for the calls of one process group, which are created in advance to keep the hot path short.

    Args:
        size: number of ranks.
        timeout_seconds: the timeout that is passed to the backend with each call.
        control_device: the device on which barriers run.
        has_mean: whether the backend can compute a mean. If it is False, the options for "mean" request the sum.
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
        """The options for broadcasts: element r is for broadcasts from rank r."""
        for src in range(size):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = src, 0, timeout
            self.broadcast.append(options)


def new_group(
    parent: dist.ProcessGroup,
    ranks: list[int],
    token: bytes,
    gather: Gather,
    *,
    backends: Mapping[str, str],
    timeout_seconds: float,
) -> dist.ProcessGroup:
    """Create a process group of some of the ranks of `parent`. Only these ranks call this function.

    The new group has a random name. torch.distributed.new_group(use_local_synchronization=True) cannot be used, because
    it derives the name from the number of groups that the calling rank has been in. Ranks with different numbers of
    groups would use different names and wait forever. And a group created after another one was destroyed could get
    the same name, and find the old addresses in the store.

    Args:
        parent: a process group of which this rank is a member.
        ranks: the members of the new group, including this rank, by their ranks in `parent`.
        token: eight random bytes, which are the same on all members.
        gather: a function between these ranks, by which they exchange addresses.
        backends: a map from device type to backend.
        timeout_seconds: the timeout of the new group.

    Raises:
        RuntimeError: the members could not connect to each other.
    """
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    backend = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    if set(backends.values()) == {"gloo"}:
        backend = (
            "gloo"  # one backend for all devices, because torch warns about a group without a default backend
        )
    name = name_of_new_group(token)
    rank, store = ranks.index(dist.get_rank(parent)), PrefixStore(name, parent.get_group_store())
    with addresses_gathered(gather):
        group = new_group_of(global_ranks, rank, backend, store, name, timedelta(seconds=timeout_seconds))
    record_ranks(group, global_ranks)
    return group


def name_of_new_group(token: bytes) -> str:
    """Return the name of the group that `new_group` creates with this token."""
    return f"syncline-{token[:8].hex()}"


def destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroy the process group that is the only element of `groups`, and clear the list.

    The caller must hold no other reference to the group. The group's destructor waits for operations under way, and
    other ranks might never join these operations. So the destructor runs on a separate thread, and this function waits
    for that thread only a short time.
    """

    def destroy() -> None:
        with contextlib.suppress(
            Exception
        ):  # the program may destroy the group at the same time; the result is not needed
            if is_living(groups[0]):
                dist.destroy_process_group(groups[0])
        groups.clear()

    thread = threading.Thread(target=destroy, name="syncline destroys a group", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        destroy()
    else:
        AT_EXIT.wait_for(thread)
        thread.join(_DESTROY_SECONDS)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return a group's map from device type to backend, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = str(dist.get_backend_config(group))
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}
