"""Handles of the native core: a group of ranks, its lanes, and tensors that it reduces in place. The codes of calls.

A call is encoded in 64 bits. The native core executes the code, and `call_of` converts the code to words for messages.
From the lowest bits up, a code contains: the kind (8 bits), the dtype (8) and operation (8) of a reduction, the other
rank (16), the bytes per element (8), and the tensor's own dtype (8). The tensor's own dtype is part of the code because
the core reduces bools as bytes and complex numbers as pairs.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from syncline.liveness.calls import Call
from syncline.transport.base import REDUCE_OPS
from syncline.transport.shared_memory.core import MAX_ABORT_BYTES, Outcome, library
from syncline.transport.shared_memory.hub import Hub
from syncline.transport.shared_memory.memory import SharedMemory


class Kind(IntEnum):
    """The kinds of operations, by the numbers of the native core."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5
    RECV = 6
    IN_PLACE_ALL_REDUCE = 7
    IN_PLACE_REDUCE_SCATTER = 8

    @property
    def words(self) -> str:
        """The name of the operation, for messages."""
        name = self.name.lower()
        operation = name.removeprefix("in_place_")
        return name if operation == name else f"{operation} in place"


_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.IN_PLACE_ALL_REDUCE, Kind.IN_PLACE_REDUCE_SCATTER)

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
"""The core's numbers of the dtypes in which it reduces tensors. A complex number is a pair of floats for the core."""

REDUCED_DTYPES = tuple(_REDUCED_AS)
"""Every dtype that can be reduced."""

_ALL_DTYPES = sorted(
    {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}, key=str
)

_NUMBER_OF = {dtype: number for number, dtype in enumerate(_ALL_DTYPES)}


def code_of(kind: int, dtype: torch.dtype | None = None, op: str | None = None, peer: int = 0) -> int:
    """Return the code of a call.

    Args:
        kind: a member of `Kind`.
        dtype: the dtype of the tensor; None for a barrier.
        op: the operation of a reduction; None for other kinds.
        peer: the source of a broadcast, or the other rank of a message.
    """
    code = kind | peer << 24
    if dtype is None:
        return code
    code |= _NUMBER_OF[dtype] << 48
    if op is None:
        return code | dtype.itemsize << 40
    itemsize_bytes = dtype.itemsize // _width(dtype)
    return code | _REDUCED_AS[dtype] << 8 | REDUCE_OPS.index(op) << 16 | itemsize_bytes << 40


def reduction_codes(kind: int) -> dict[tuple[torch.dtype, str], int]:
    """Return the codes of a kind of reduction, by dtype and operation."""
    return {(dtype, op): code_of(kind, dtype, op) for dtype in REDUCED_DTYPES for op in REDUCE_OPS}


def core_numel(tensor: Tensor) -> int:
    """Return the number of elements as the core counts them: a complex number counts as two elements."""
    return tensor.numel() * _width(tensor.dtype)


def _width(dtype: torch.dtype) -> int:
    """Return the number of elements of the core per element of a dtype."""
    return 2 if dtype.is_complex else 1


def call_of(code: int, numel: int, *, size: int, peer: int | None = None) -> Call:
    """Return a description of a call, for errors.

    Args:
        code: the code of the call.
        numel: number of elements as the core counts them. A complex number counts as two elements. For a
            reduce_scatter, only the part of one rank counts.
        size: number of ranks.
        peer: the other rank of a message, because the core does not keep this rank in the code.

    Example:
        >>> print(call_of(code_of(Kind.ALL_REDUCE, torch.complex64, "sum"), 6, size=2))
        all_reduce(sum) of 3 elements, torch.complex64
        >>> print(call_of(code_of(Kind.BROADCAST, torch.bool, peer=1), 5, size=2))
        broadcast(from rank 1) of 5 elements, torch.bool
    """
    kind = Kind(code & 0xFF)
    if kind == Kind.BARRIER:
        return Call("barrier")
    dtype = _ALL_DTYPES[code >> 48 & 0xFF]
    detail = ""
    if kind in _REDUCTIONS:
        detail = REDUCE_OPS[code >> 16 & 0xFF]
        numel //= _width(dtype)
    if kind == Kind.REDUCE_SCATTER:
        numel *= size
    elif kind == Kind.BROADCAST:
        detail = f"from rank {code >> 24 & 0xFFFF}"
    elif kind == Kind.SEND and peer is not None:
        detail = f"to rank {peer}"
    elif kind == Kind.RECV and peer is not None:
        detail = f"from rank {peer}"
    return Call(kind.words, detail, numel, dtype)


_SPIN_NANOSECONDS = 200_000
"""How long a wait spins before it sleeps, if each rank has a CPU core of its own."""

_NUM_YIELDS = 30
"""How often a wait yields to other processes before it sleeps, if there are more ranks than CPU cores."""

_MAX_UNDER_WAY = 256
"""How many operations a lane keeps before it looks for completed operations that no thread has waited for."""


class LaneSizes:
    """The memory layout of a lane, the same on all ranks.

    Args:
        size: number of ranks.
        has_messages: whether the lane should be fast for large messages between two ranks.

    Attributes:
        num_slots: number of chunks that may be under way at the same time.
        chunk_bytes: size of one rank's chunk in one slot. The chunks of all ranks should fit the second-level caches.
        message_bytes: size of the pieces into which a message between two ranks is cut.
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
    """This rank's handle of a group of ranks that share memory.

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
        """Return the number of bytes of memory that a group needs."""
        num_bytes: int = library().group_bytes(size)
        return num_bytes

    def abort(self, text: str) -> None:
        """End the group on all ranks, and wake up all waits. If ranks give different texts, the first one is kept."""
        data = text.encode()[:MAX_ABORT_BYTES]
        library().abort(self.handle, data, len(data))

    def abort_text(self) -> str | None:
        """Return the text that the first `abort` gave; None if no rank has called `abort`."""
        buffer = ctypes.create_string_buffer(MAX_ABORT_BYTES)
        num_bytes = library().abort_text(self.handle, buffer)
        return None if num_bytes < 0 else buffer.raw[:num_bytes].decode(errors="replace")


class EngineLane:
    """This rank's handle of a lane. The native core counts the operations of each lane separately.

    Args:
        engine: the handle of the group.
        memory: shared memory of `sizes.total_bytes` bytes, the same on all ranks.
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
        """The memory that the core still uses, by queue and ticket. (Tensors could keep this lane alive.)"""
        # A garbage collection may free a lane and its memory in any order, while another thread still advances
        # operations on all lanes. So the memory is kept until the lane is closed.
        memories = (memory, engine.memory, self.under_way)
        weakref.finalize(self, _close, library().lane_close, self.handle, memories).atexit = False

    def keep(self, queue: int, ticket: int, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors while an operation is under way, even if no thread waits for the operation."""
        self.under_way[queue, ticket] = [tensor.untyped_storage() for tensor in tensors]
        if len(self.under_way) > _MAX_UNDER_WAY:
            for key in list(self.under_way):
                if library().poll(self.handle, *key) == Outcome.DONE:
                    self.under_way.pop(key, None)

    def called(self) -> list[tuple[int, int]]:
        """Return code and numel of the calls that do not match, by rank; for a message, of this rank and its peer."""
        pairs = (ctypes.c_uint64 * (2 * max(2, self.engine.size)))()
        num = library().called(self.handle, pairs)
        return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(num)]

    def queue_of_sends(self, dst: int) -> int:
        """Return the number by which the core knows the queue of messages to `dst`."""
        return 1 + dst

    def queue_of_receives(self, src: int) -> int:
        """Return the number by which the core knows the queue of messages from `src`."""
        return 1 + self.engine.size + src


def _close(close: Callable[[int], None], handle: int, memories: object) -> None:
    """Close a handle. A caller that keeps this call for later keeps `memories` alive until then."""
    close(handle)


# ---------------------------------------------------------------------- tensors in shared memory


IN_PLACE_BYTES = 64 * 1024
"""Size from which tensors are reduced in place. Smaller tensors are faster with copies through a lane's memory."""

_MIN_STRIDE_BYTES = 4096


class Region(NamedTuple):
    """Memory in which each rank has a tensor that the core reduces in place. The fields are arguments of the core."""

    address: int
    """Address of the tensor of rank 0."""
    stride_bytes: int
    """Distance from the tensor of one rank to the tensor of the next rank."""
    token: int
    """A number that identifies the region, the same on all ranks."""


class Regions:
    """The tensors of a group in shared memory. All lanes of the group use the same object.

    Args:
        hub: the connections between the ranks.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.of: dict[int, Region] = {}
        """The region of each tensor that is reduced in place, by the `id` of the tensor."""

    def allocate(self, numel: int, dtype: torch.dtype, token: bytes) -> Tensor:
        """Return this rank's tensor of zeros, which is reduced in place if it is large; a collective call.

        Args:
            numel: number of elements.
            dtype: dtype of the tensor.
            token: a random number, the same on all ranks.
        """
        if numel * dtype.itemsize < IN_PLACE_BYTES:
            return torch.zeros(numel, dtype=dtype)
        stride = -(-numel * dtype.itemsize // _MIN_STRIDE_BYTES) * _MIN_STRIDE_BYTES
        memory = self._hub.allocate(self._hub.size * stride, f"{numel} elements of {dtype}")
        # Only the tensor keeps the mapping alive.
        tensor = torch.frombuffer(memory.map, dtype=dtype, count=numel, offset=self._hub.rank * stride)
        self._add(tensor, Region(memory.address, stride, int.from_bytes(token[:8], "little")))
        return tensor

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """Return the first elements of a tensor. They are reduced in place if the whole tensor is."""
        part = tensor[:numel]
        region = self.of.get(id(tensor))
        if region is not None:
            self._add(part, region)
        return part

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in memory that all ranks share; a collective call."""
        purpose = f"{numel} elements of {dtype}, one copy for all ranks"
        memory = self._hub.allocate(max(1, numel) * dtype.itemsize, purpose)
        # Only the tensor keeps the mapping alive.
        return torch.frombuffer(memory.map, dtype=dtype, count=max(1, numel))[:numel]

    def _add(self, tensor: Tensor, region: Region) -> None:
        """Reduce `tensor` in place from now on, as long as the tensor exists."""
        self.of[id(tensor)] = region
        weakref.finalize(tensor, self.of.pop, id(tensor), None).atexit = False
