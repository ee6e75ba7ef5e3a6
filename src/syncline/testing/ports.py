"""A port that stays free until a store listens there, and the environment variables that name it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from syncline.environment import Environment


@contextmanager
def held_port() -> Iterator[int]:
    """Reserve a TCP port of this host. A store may listen there, but the kernel assigns the port to no other process.

    The kernel does not assign a bound port to a process that asks for any free port. On Linux, a socket that asks for
    this very port can still bind it if both sockets set SO_REUSEADDR and none listens yet. The stores of torch and
    Syncline set this option. On other systems, the port was free a moment ago but is not reserved.

    Example:
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
    """Return torchrun's variables for one of `size` ranks on this host, whose store listens at `port`."""
    return Environment(
        launcher="environment",
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    ).variables()
