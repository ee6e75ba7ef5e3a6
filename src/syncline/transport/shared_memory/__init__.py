"""Engine for the ranks of one host, over shared memory.

core.py       find and load the native core
engine.py     handles of the native core, and the encoding of calls
hub.py        connect the ranks of a host over Unix sockets, and pass memory between them
memory.py     create and map memory; measure how much is available
peers.py      detect ranks whose process has ended
transport.py  the engine itself
work.py       an operation in shared memory, and the wait for it
"""

from __future__ import annotations
