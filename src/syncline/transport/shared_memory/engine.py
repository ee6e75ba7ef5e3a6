"""Handles of the native core (a group of ranks that share memory, and its lanes), and the encoding of calls.

A call is encoded in 64 bits. The native core executes the code, and `call_of` converts it to words for messages. From
the lowest bits up, a code contains: the kind (8 bits), the dtype (8) and operation (8) of a reduction, the other rank
(16), the bytes per element (8), and the tensor's own dtype (8). The latter is needed because the core reduces bools as
bytes and complex numbers as pairs.
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


class Kind:
    """The kinds of operations."""

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

# The core's numbers for dtypes.
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
    """Return the code of a call.

    Args:
        kind: a member of `Kind`.
        dtype: dtype of the tensor; None for a barrier.
        op: operation of a reduction; None for other kinds.
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
    """Return the codes of a kind of reduction, by dtype and operation."""
    return {(dtype, op): code_of(kind, dtype, op) for dtype in dtypes for op in REDUCE_OPS}


def call_of(code: int, numel: int, *, size: int, peer: int | None = None) -> Call:
    """Return a call in words, as the ranks' errors show it.

    Args:
        code: the code of the call.
        numel: number of elements as the core counts them: a complex number counts as two, and for a reduce_scatter
            only one rank's part counts.
        size: number of ranks.
        peer: the other side of a message, because the core does not keep it in the code.

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
"""How long a wait spins before it sleeps, if each rank has a CPU core of its own."""

_NUM_YIELDS = 30
"""How often a wait yields to other processes before it sleeps, if there are more ranks than CPU cores."""


class LaneSizes:
    """The memory layout of a lane, the same on all ranks.

    Args:
        size: number of ranks.
        has_messages: whether large messages between two ranks should be fast.

    Attributes:
        num_slots: number of chunks that may be under way at once.
        chunk_bytes: size of one rank's chunk in one slot. The traffic of a chunk should fit the second-level caches.
        message_bytes: size of the pieces of a message between two ranks.
        total_bytes: size of the lane's memory.
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
    """This rank's handle of a group.

    Args:
        memory: shared memory of `Engine.num_bytes(size)` bytes, the same on all ranks.
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
        """Return the size of a group's memory."""
        num_bytes: int = library().group_bytes(size)
        return num_bytes

    def abort(self, text: str) -> None:
        """End the group on all ranks, and wake up sleeping waits. The first text is kept."""
        data = text.encode()[:MAX_ABORT_BYTES]
        library().abort(self.handle, data, len(data))

    def abort_text(self) -> str | None:
        """Return the text of the abort that ended the group; None if there was none."""
        buffer = ctypes.create_string_buffer(MAX_ABORT_BYTES)
        num_bytes = library().abort_text(self.handle, buffer)
        return None if num_bytes < 0 else buffer.raw[:num_bytes].decode(errors="replace")


class EngineLane:
    """This rank's handle of a lane. The native core counts the operations of each lane separately.

    Args:
        engine: the group.
        memory: shared memory of `sizes.total_bytes` bytes.
        sizes: the layout of the memory.
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
        """Storages that the core still reads and writes, by queue and ticket. Tensors could keep this lane alive."""
        # A garbage collection may free a lane together with its memory, and the memory first. Any other thread may
        # still advance operations on all lanes. So the memory is kept until the lane is closed.
        memories = (memory, engine.memory, self.under_way)
        weakref.finalize(self, _close, library().lane_close, self.handle, memories).atexit = False

    def keep(self, queue: int, ticket: int, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors while an operation is under way, even if no thread waits for it."""
        self.under_way[queue, ticket] = [tensor.untyped_storage() for tensor in tensors]
        if len(self.under_way) > 256:
            for key in list(self.under_way):
                if library().poll(self.handle, *key) == 0:
                    self.under_way.pop(key, None)

    def called(self) -> list[tuple[int, int]]:
        """Return code and numel of each rank's call after a mismatch; for a message, of this rank and its peer only."""
        pairs = (ctypes.c_uint64 * (2 * max(2, self.engine.size)))()
        num = library().called(self.handle, pairs)
        return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(num)]

    def queue_of_sends(self, dst: int) -> int:
        """Return the core's number of the queue of messages to `dst`."""
        return 1 + dst

    def queue_of_receives(self, src: int) -> int:
        """Return the core's number of the queue of messages from `src`."""
        return 1 + self.engine.size + src


def _close(close: Callable[[int], None], handle: int, memories: object) -> None:
    """Close a handle. The argument `memories` keeps the memory alive until then."""
    close(handle)
