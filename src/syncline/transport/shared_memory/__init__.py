"""Engine: the ranks of one host, over memory that all of them map.

core.py       find and load the native core
engine.py     calls of the native core, and their codes
hub.py        connections between the ranks of a host, over which memory is passed on
memory.py     create and map memory; how much is left
regions.py    tensors in shared memory: reduced in place, or one copy for all ranks
sockets.py    Unix sockets between two ranks: who may connect, bytes, files, which process has ended
transport.py  the engine itself
work.py       an operation in shared memory, and how it is waited for
"""

from __future__ import annotations

from syncline.transport.shared_memory.core import SharedMemoryUnavailable, find_library, library
from syncline.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport", "SharedMemoryUnavailable", "find_library", "library"]
