"""Selection of a transport: shared memory, a hierarchy of shared memory and Gloo, or torch.distributed alone."""

from __future__ import annotations

import warnings

from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.hierarchy import HierarchicalTransport
from syncline.transport.shared_memory.core import SharedMemoryUnavailable
from syncline.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["best_over"]


_has_warned = False


def best_over(c10d: C10dTransport, asked: str) -> Transport:
    """Return the requested transport, or for "auto" the best one that all ranks can use; a collective call.

    Args:
        c10d: a transport between the ranks. The returned transport closes it.
        asked: "auto", "c10d" or "shm", the same on all ranks.

    Raises:
        SharedMemoryUnavailable: "shm" was requested and is not available. The text gives the same reason on all ranks.
    """
    global _has_warned
    if asked == "c10d":
        return c10d
    try:
        return SharedMemoryTransport.over(c10d) if asked == "shm" else HierarchicalTransport.over(c10d)
    except SharedMemoryUnavailable as error:
        if asked == "shm":
            text = f'sl.init(transport="shm"): {error}'
            if not error.is_worth_a_warning:
                text += f'\nUse transport="auto": shared memory within each host, {c10d.name} between them'
            raise SharedMemoryUnavailable(text) from error
        if error.is_worth_a_warning and not _has_warned and c10d.rank == 0:
            _has_warned = True
            warnings.warn(
                f"{error}\nTensors on the CPU travel by {c10d.name} instead, more slowly", stacklevel=4
            )
        return c10d
