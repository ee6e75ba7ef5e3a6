"""A reserved port at which a store can listen, and the environment variables that pass the port to a rank."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from syncline.launchers import Environment


@contextmanager
def held_port() -> Iterator[int]:
    """Reserve a TCP port of this host, and yield its number. A store can listen at the port inside the context.

    A socket is bound to the port until the context ends. The kernel therefore does not assign the port to a process
    that asks for any free port. On Linux, a second socket can nevertheless bind to this port by its number if both
    sockets set SO_REUSEADDR and neither listens yet. The stores of torch and Syncline set this option. On other
    systems, the port is not reserved. It was free when this function looked.

    Examples:
        >>> from torch.distributed import TCPStore
        >>> with held_port() as port:
        ...     store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        >>> store.port == port
        True
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def variables_of_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for one rank of a job on this host.

    Args:
        rank: the rank.
        size: the number of ranks.
        port: the port at which the store of the job listens.
    """
    return Environment(
        launcher="environment",
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    ).variables()
