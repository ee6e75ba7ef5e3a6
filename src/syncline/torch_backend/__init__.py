"""The torch.distributed backend "syncline": torch's own programs on Syncline's shared-memory engine.

    import syncline as sl
    sl.register_backend()                                  # torch 2.15 and later find it without
    dist.init_process_group("cpu:syncline,cuda:nccl")      # or "syncline", or "cpu:syncline"

Imports: errors, _torch, transport.

base.py         the state of a group, and how a call ends
collectives.py  torch's collectives, built from a transport's operations
group.py        the process group that torch gets
work.py         what a collective returns
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from syncline.torch_backend.base import BACKEND
from syncline.torch_backend.group import SynclineProcessGroup
from syncline.transport.base import Transport

__all__ = ["register_backend"]


def register_backend() -> None:
    """Make "syncline" known to torch.distributed; calling it again changes nothing.

    torch 2.15 and later call this themselves when a group is made with that backend. Gloo stays the default for CPU
    tensors.

    Example:
        >>> register_backend()
        >>> dist.is_backend_available("syncline")
        True
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(given: Any, options: Any) -> SynclineProcessGroup:
    """Called by torch for each new group, by all its ranks."""
    transport = _engine(given.store, given.group_rank, given.group_size, given.timeout.total_seconds())
    return SynclineProcessGroup(transport, given.store, given.group_id, list(given.global_ranks_in_group))


def _engine(store: Any, rank: int, size: int, timeout_seconds: float) -> Transport:
    """A transport among the ranks that share `store`."""
    from syncline.transport.shared_memory.transport import SharedMemoryTransport

    return SharedMemoryTransport.connect(store, rank=rank, size=size, timeout_seconds=timeout_seconds)
