"""The engine for the ranks of one host, over memory that all of them have mapped.

core.py       what the native core returns, its limits, and the error of ranks that cannot share memory
engine.py     handles of the native core, codes of calls, and tensors in shared memory
hub.py        connections between the ranks of a host, over which memory is passed on
medium.py     places and failures of the ranks, in memory that all of them have mapped
memory.py     create and map memory, and measure how much memory is available
sockets.py    Unix sockets between two ranks: connect, send bytes and files, and detect ended processes
transport.py  the transport
work.py       an operation in shared memory, and the wait for it
"""

from __future__ import annotations

from syncline.transport.shared_memory.core import SharedMemoryUnavailable
from syncline.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport", "SharedMemoryUnavailable"]
