"""Process groups whose other ranks are imitated by this process (`transport/mirror.py`), for `syncline explain`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.torch_backend.group import SynclineProcessGroup
from syncline.transport.mirror import MirrorTransport

MIRROR = "syncline_mirror"


class MirrorProcessGroup(SynclineProcessGroup):
    """A process group of one process, whose other ranks are imitated. It serves tensors on every device."""

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend


def register_mirror() -> str:
    """Register the backend of torch.distributed whose other ranks are imitated, and return its name."""
    if MIRROR not in dist.Backend.backend_list:
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        dist.Backend.register_backend(MIRROR, _create, extended_api=True, devices=devices)
    return MIRROR


def _create(given: Any, options: Any) -> MirrorProcessGroup:
    """Create a process group. Torch calls this function for each new group."""
    transport = MirrorTransport(
        rank=given.group_rank, size=given.group_size, timeout_seconds=given.timeout.total_seconds()
    )
    return MirrorProcessGroup(transport, given.store, given.group_id, list(given.global_ranks_in_group))
