from __future__ import annotations
import socket
from dataclasses import dataclass
import torch
import torch.distributed as dist
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.threads import ThreadGroup
@dataclass(frozen=True, kw_only=True)
class World:
    rank: int; size: int; local_rank: int; local_size: int; host: str; generation: int; device: torch.device
_T = {}
def world() -> World:
    r, n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return World(rank=r, size=n, local_rank=r, local_size=n, host=socket.gethostname(), generation=0, device=torch.device("cpu"))
def init(transport="auto", *, timeout=300, device=None) -> World:
    import os
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1: dist.init_process_group("gloo")
    return world()
def shutdown() -> None:
    _T.clear()
    if dist.is_initialized(): dist.destroy_process_group()
def transport_of(group=None) -> Transport:
    if isinstance(group, Transport): return group
    key = group if group is not None else (dist.group.WORLD if dist.is_initialized() else None)
    if key not in _T: _T[key] = C10dTransport(key) if key is not None else ThreadGroup(1).transport(0)
    return _T[key]
