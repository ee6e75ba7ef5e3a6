"""Handles of the native core: a group of ranks that share memory, and its lanes.

How a call is written in 64 bits: for the native core, which acts by it, and to be put into words again.

From the lowest bits up: kind (8), dtype (8) and operation (8) of a reduction, the other rank (16), bytes of an element
(8), and what the tensor's dtype really is (8), for the core reduces bools as bytes and complex numbers as pairs.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from syncline.liveness.calls import Call
from syncline.transport.base import REDUCE_OPS
from syncline.transport.shared_memory.core import MAX_ABORT_BYTES, library
from syncline.transport.shared_memory.memory import SharedMemory

__all__ = [
    "REDUCED_DTYPES",
    "Engine",
    "EngineLane",
    "Kind",
    "LaneSizes",
    "call_of",
    "code_of",
    "reduction_codes",
]


class Kind:
    """What is done."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5
    RECV = 6
    ALL_REDUCE_IN_PLACE = 7
    REDUCE_SCATTER_IN_PLACE = 8


_WORDS = {
    Kind.BARRIER: "barrier",
    Kind.ALL_REDUCE: "all_reduce",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALL_GATHER: "all_gather",
    Kind.BROADCAST: "broadcast",
    Kind.SEND: "send",
    Kind.RECV: "recv",
    Kind.ALL_REDUCE_IN_PLACE: "all_reduce in place",
    Kind.REDUCE_SCATTER_IN_PLACE: "reduce_scatter in place",
}

_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE_IN_PLACE, Kind.REDUCE_SCATTER_IN_PLACE)

# By the numbers that the core gives them.
_REDUCED_AS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 5,
    torch.complex64: 0,
    torch.complex128: 1,
}

_ITEMSIZE_BYTES = (4, 8, 2, 2, 1, 1, 2, 4, 8)

_ALL_DTYPES = sorted(
    {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}, key=str
)

_NUMBER_OF = {dtype: number for number, dtype in enumerate(_ALL_DTYPES)}


def code_of(kind: int, dtype: torch.dtype | None = None, op: str | None = None, peer: int = 0) -> int:
    """The code of a call.

    Args:
        kind: a member of `Kind`.
        dtype: of the tensor; None for a barrier.
        op: of a reduction.
        peer: the source of a broadcast, or the other side of a message.
    """
    code = kind | peer << 24
    if dtype is None:
        return code
    code |= _NUMBER_OF[dtype] << 48
    if op is None:
        return code | dtype.itemsize << 40
    native = _REDUCED_AS[dtype]
    return code | native << 8 | REDUCE_OPS.index(op) << 16 | _ITEMSIZE_BYTES[native] << 40


def reduction_codes(kind: int, dtypes: Iterable[torch.dtype]) -> dict[tuple[torch.dtype, str], int]:
    """Codes by dtype and operation."""
    return {(dtype, op): code_of(kind, dtype, op) for dtype in dtypes for op in REDUCE_OPS}


def call_of(code: int, numel: int, *, size: int, peer: int | None = None) -> Call:
    """A call in words, as the ranks' errors show it.

    Args:
        code: of the call.
        numel: as the core counts: pairs as two, and parts one by one.
        size: number of ranks.
        peer: the other side of a message, whose code does not tell.

    Example:
        >>> print(call_of(code_of(Kind.ALL_REDUCE, torch.complex64, "sum"), 6, size=2))
        all_reduce(sum) of 3 elements, torch.complex64
        >>> print(call_of(code_of(Kind.BROADCAST, torch.bool, peer=1), 5, size=2))
        broadcast(from rank 1) of 5 elements, torch.bool
    """
    kind = code & 0xFF
    if kind == Kind.BARRIER:
        return Call("barrier")
    dtype = _ALL_DTYPES[code >> 48 & 0xFF]
    detail = ""
    if kind in _REDUCTIONS:
        detail = REDUCE_OPS[code >> 16 & 0xFF]
        if dtype.is_complex:
            numel //= 2
    if kind == Kind.REDUCE_SCATTER:
        numel *= size
    elif kind == Kind.BROADCAST:
        detail = f"from rank {code >> 24 & 0xFFFF}"
    elif kind == Kind.SEND and peer is not None:
        detail = f"to rank {peer}"
    elif kind == Kind.RECV and peer is not None:
        detail = f"from rank {peer}"
    return Call(_WORDS[kind], detail, numel, dtype)


REDUCED_DTYPES = tuple(_REDUCED_AS)
"""Every dtype that can be reduced."""

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
