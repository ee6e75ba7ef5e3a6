"""`share_`: one copy of a module's parameters for all ranks of a host. `write_shared`: change that copy."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.checks import checked_kind
from syncline.gradients.shard import view_like
from syncline.session.world import transport_of
from syncline.sharded.one_copy import OneCopy, one_copy_of, remember_one_copy
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport

__all__ = ["share_", "write_shared"]


AnyModule = TypeVar("AnyModule", bound=nn.Module)

_ALIGNMENT_BYTES = 64


def share_(module: AnyModule, *, group: dist.ProcessGroup | Transport | None = None) -> AnyModule:
    """Move the parameters of `module` into shared memory: one copy per host, with rank 0's values.

    All parameters are moved, frozen ones too, and their own memory is freed. Buffers are not shared, because forwards
    write them. A collective call. Afterwards parameters may be written only inside of `sl.write_shared(module)`, or by
    the optimizer of `sl.DistributedDataParallel(module, sharded=True)`.

    Args:
        module: the same on all ranks, on the CPU.
        group: the ranks, on one host or on several hosts with equally many ranks each, that share memory: a
            `torch.distributed` process group, a Syncline transport, or None for the default group.

    Returns:
        `module` itself.

    Raises:
        TypeError: not a module.
        ValueError: the group has no shared memory (for example because each rank is on a host of its own, or `c10d` was
            chosen explicitly), or a parameter is not on the CPU. All ranks raise it.
        ContractMismatch: the ranks' modules differ; the same text on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> model = sl.share_(torch.nn.Linear(2, 1))
        >>> with sl.write_shared(model), torch.no_grad():
        ...     _ = model.weight.zero_()
    """
    transport = transport_of(group)
    fault, named = None, []
    try:
        checked_kind("module", module, nn.Module, "a torch.nn.Module")
        named = list(module.named_parameters())
    except TypeError as error:
        fault = error
    exchange(transport, "sl.share_", describe_tensors(named), fault=fault)
    lane = transport.lane(f"parameters of {type(module).__name__}")
    if lane is not transport:
        weakref.finalize(module, lane.close)
    views = _allocate([p for _, p in named], transport)
    team = transport.team(torch.device("cpu"))
    with torch.no_grad():
        if team.size < lane.size:
            TensorBroadcaster([p.detach() for _, p in named], lane).start(0).wait()
        if team.position == 0:
            for view, (_, parameter) in zip(views, named, strict=True):
                view.copy_(parameter)
    lane.barrier().wait()
    for view, (_, parameter) in zip(views, named, strict=True):
        parameter.data = view
    remember_one_copy(module, OneCopy(named, lane, num_copies=lane.size // team.size))
    return module


def write_shared(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which shared parameters may be written, by one rank or by all ranks with the same values.

    Entering is a collective call: all ranks have arrived, so none reads. Leaving is one too: all ranks have written. If
    there are several copies (one per host, or one per rank with `sharded=True` and without shared memory), leaving
    sends the values of rank 0's copy to all others. A program in which rank 0 writes is therefore right in each case.

    Args:
        module: the module that was given to `sl.share_` or wrapped with `sharded=True`, or the wrapper.

    Raises:
        ValueError: the module's parameters are not shared.
        SynclineError: the parameters were written outside of such a context before. Raised on entering, on all ranks.
    """
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    copy = one_copy_of(module)
    if copy is None and isinstance(module, nn.parallel.DistributedDataParallel):
        copy = one_copy_of(module.module)
    if copy is None:
        raise ValueError(
            f"the parameters of this {type(module).__name__} are not shared: sl.share_(module) shares them, or "
            "sharded=True. Of a part of a module that is shared, name the module"
        )
    return copy.writing()


def _allocate(parameters: list[Tensor], transport: Transport) -> list[Tensor]:
    """Return a view in shared memory for each parameter; parameters of one type are adjacent."""
    views: dict[int, Tensor] = {}
    kinds = sorted({(str(p.dtype), str(p.device)) for p in parameters})
    for kind in kinds:
        members = [p for p in parameters if (str(p.dtype), str(p.device)) == kind]
        multiple = max(1, _ALIGNMENT_BYTES // members[0].element_size())
        offsets, numel = [], 0
        for member in members:
            offsets.append(numel)
            numel += -(-member.numel() // multiple) * multiple
        flat = transport.allocate_shared(numel, members[0].dtype, members[0].device)
        if flat is None:
            raise ValueError(
                f"sl.share_: expected ranks that share memory, got {transport.name} and a parameter on "
                f"{members[0].device}. Shared memory serves CPU tensors of ranks on one host, or on several with as "
                'many ranks each (on one host, sl.init(transport="shm") says why it is not available)'
            )
        for member, offset in zip(members, offsets, strict=True):
            views[id(member)] = view_like(flat, offset, member)
    return [views[id(p)] for p in parameters]
