"""Handles of the native core: a group of ranks that share memory, and its lanes."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, UntypedStorage

from syncline.transport.shared_memory.library import MAX_ABORT_BYTES, library
from syncline.transport.shared_memory.memory import SharedMemory

__all__ = ["Engine", "EngineLane", "LaneSizes"]

_SPIN_NANOSECONDS = 200_000
"""How long a wait looks again and again before it sleeps, where each rank has a core of its own."""
_NUM_YIELDS = 30
"""How often a wait lets other processes go first before it sleeps, where there are more ranks than cores."""


class LaneSizes:
    """How the memory of a lane is laid out, the same on all ranks.

    Args:
        size: number of ranks.
        has_messages: whether large messages between two ranks are to be fast.

    Attributes:
        num_slots: chunks that may be under way at once.
        chunk_bytes: of one rank, in one slot: its traffic should stay in the second-level caches.
        message_bytes: what a message between two ranks is cut into.
    """

    def __init__(self, size: int, *, has_messages: bool = True) -> None:
        self.num_slots = 4
        self.chunk_bytes = 128 * 1024 if size <= 16 else 64 * 1024
        most = 256 * 1024 if has_messages else 8 * 1024
        self.message_bytes = min(most, max(2048, 2**20 // size**2 // 128 * 128))
        self.total_bytes: int = library().lane_bytes(
            size, self.num_slots, self.chunk_bytes, self.message_bytes
        )


class Engine:
    """This rank's side of a group.

    Args:
        memory: of `Engine.num_bytes(size)` bytes, the same on all ranks.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, memory: SharedMemory, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.memory = memory
        spin = _SPIN_NANOSECONDS if size <= len(os.sched_getaffinity(0)) else 0
        self.handle = library().group_open(memory.address, rank, size, spin, _NUM_YIELDS)
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library().group_close, self.handle).atexit = False

    @staticmethod
    def num_bytes(size: int) -> int:
        """What a group's memory takes."""
        num_bytes: int = library().group_bytes(size)
        return num_bytes

    def abort(self, text: str) -> None:
        """End the group on all ranks, asleep or not; the first text stays."""
        data = text.encode()[:MAX_ABORT_BYTES]
        library().abort(self.handle, data, len(data))

    def abort_text(self) -> str | None:
        """What it was ended with; None if it was not."""
        buffer = ctypes.create_string_buffer(MAX_ABORT_BYTES)
        num_bytes = library().abort_text(self.handle, buffer)
        return None if num_bytes < 0 else buffer.raw[:num_bytes].decode(errors="replace")


class EngineLane:
    """This rank's handle of a lane: operations of the native core that are counted apart from those of other lanes.

    Args:
        engine: the group.
        memory: of `sizes.total_bytes` bytes.
        sizes: how it is laid out.
    """

    def __init__(self, engine: Engine, memory: SharedMemory, sizes: LaneSizes) -> None:
        self.engine = engine
        self.sizes = sizes
        self.handle = library().lane_open(
            engine.handle, memory.address, sizes.num_slots, sizes.chunk_bytes, sizes.message_bytes
        )
        if not self.handle:
            raise MemoryError
        self.under_way: dict[tuple[int, int], list[UntypedStorage]] = {}
        """What the core still reads and writes, by queue and ticket. No tensors: one could hold on to this lane."""
        # A garbage collection may free a lane and its memory at once, the memory first; and any other thread moves on
        # what is under way on all lanes. So the memory stays until the lane is closed.
        memories = (memory, engine.memory, self.under_way)
        weakref.finalize(self, _close, library().lane_close, self.handle, memories).atexit = False

    def keep(self, queue: int, ticket: int, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors while an operation is under way, even if nobody waits for it."""
        self.under_way[queue, ticket] = [tensor.untyped_storage() for tensor in tensors]
        if len(self.under_way) > 256:
            for key in list(self.under_way):
                if library().poll(self.handle, *key) == 0:
                    self.under_way.pop(key, None)

    def called(self) -> list[tuple[int, int]]:
        """After a mismatch: code and numel of each rank's call; of a message only this rank's and the peer's."""
        pairs = (ctypes.c_uint64 * (2 * max(2, self.engine.size)))()
        num = library().called(self.handle, pairs)
        return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(num)]

    def queue_of_sends(self, dst: int) -> int:
        """The core's number for messages to `dst`."""
        return 1 + dst

    def queue_of_receives(self, src: int) -> int:
        """The core's number for messages from `src`."""
        return 1 + self.engine.size + src


def _close(close: Callable[[int], None], handle: int, memories: object) -> None:
    """Close what uses memories, which are held until then."""
    close(handle)
