"""The torch.distributed backend "syncline". With it, a program's torch.distributed calls use shared memory.

    import syncline as sl
    sl.register_backend()                                  # not needed with torch 2.15 and later
    dist.init_process_group("cpu:syncline,cuda:nccl")      # or "syncline", or "cpu:syncline"

Imports: errors, _torch, liveness, transport.

arguments.py    the arguments that the operations accept
collectives.py  the state of a process group, and torch's collectives, built from a transport's operations
group.py        the process group that torch uses
work.py         the work objects that collectives return
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from syncline.torch_backend.collectives import BACKEND
from syncline.torch_backend.group import SynclineProcessGroup
from syncline.transport.base import Transport

__all__ = ["register_backend"]


def register_backend() -> None:
    """Register "syncline" as a backend of torch.distributed. Repeated calls have no effect.

    Gloo stays the default backend for CPU tensors. torch 2.15 and later call this function themselves when a program
    creates a group with the backend "syncline".

    Examples:
        >>> register_backend()
        >>> dist.is_backend_available("syncline")
        True
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(given: Any, options: Any) -> SynclineProcessGroup:
    """Create a process group. Torch calls this function for each new group, on all ranks of the group."""
    transport = _engine(given.store, given.group_rank, given.group_size, given.timeout.total_seconds())
    return SynclineProcessGroup(transport, given.store, given.group_id, list(given.global_ranks_in_group))


def _engine(store: Any, rank: int, size: int, timeout_seconds: float) -> Transport:
    """Create a transport that connects the ranks of a group. The ranks find each other through `store`."""
    from syncline.transport.shared_memory.transport import SharedMemoryTransport

    return SharedMemoryTransport.connect(store, rank=rank, size=size, timeout_seconds=timeout_seconds)
