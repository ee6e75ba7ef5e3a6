"""The engine for the ranks of one host, over memory that all of them have mapped.

engine.py     handles of the native core, what it returns, codes of calls, and tensors in shared memory
hub.py        connections between the ranks of a host, over which memory is passed on; whether they can share memory
medium.py     places and failures of the ranks, in memory that all of them have mapped
memory.py     create and map memory, and measure how much memory is available
sockets.py    Unix sockets between two ranks: connect, send bytes and files, and detect ended processes
transport.py  the transport; an operation in shared memory, and the wait for it
"""

from __future__ import annotations

from syncline.transport.shared_memory.hub import SharedMemoryUnavailable
from syncline.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport", "SharedMemoryUnavailable"]
