"""The Python side of the native core: handles of a group and its lanes, codes of calls, and tensors in shared memory.

A call is encoded as an integer of 64 bits. The native core executes the code, and `call_of` converts the code to words
for messages. From the lowest bits up, a code contains: the kind of the operation (8 bits), the dtype in which the core
reduces (8 bits), the reduce operation (8 bits), the other rank of a broadcast or message (16 bits), the bytes per
element (8 bits), and the tensor's own dtype (8 bits). The tensor's own dtype can differ from the dtype in which the
core reduces, because the core reduces bools as bytes and complex numbers as pairs of floats.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from syncline.environment import num_cores
from syncline.liveness.calls import Call
from syncline.transport.base import REDUCE_OPS
from syncline.transport.shared_memory.hub import Hub, library
from syncline.transport.shared_memory.memory import SharedMemory

MAX_ABORT_BYTES = 65536


class Outcome:
    """The values that `wait` and `poll` of the native core return."""

    DONE = 0
    PENDING = 1
    ABORTED = 2
    MISMATCH = 3
    DISAGREED = 4


class Kind(IntEnum):
    """The kinds of operations. The values are the numbers of the kinds in the native core."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5
    RECV = 6
    IN_PLACE_ALL_REDUCE = 7
    IN_PLACE_REDUCE_SCATTER = 8
    REDUCE = 9
    IN_PLACE_REDUCE = 10

    @property
    def words(self) -> str:
        """The name of this kind of operation in messages, such as "all_reduce in place".

        A reduction to the leader of a host is a part of an all_reduce, which is what the program has called.
        """
        name = self.name.lower()
        if self in (Kind.REDUCE, Kind.IN_PLACE_REDUCE):
            name = name.replace("reduce", "all_reduce")
        operation = name.removeprefix("in_place_")
        return name if operation == name else f"{operation} in place"


_REDUCTIONS = (
    Kind.ALL_REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.IN_PLACE_ALL_REDUCE,
    Kind.IN_PLACE_REDUCE_SCATTER,
    Kind.REDUCE,
    Kind.IN_PLACE_REDUCE,
)

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
"""A map from a tensor's dtype to the dtype in which the core reduces the tensor, given as a number of the core.

The core reduces a complex number as a pair of floats, and a bool as a byte.
"""

REDUCED_DTYPES = tuple(_REDUCED_AS)
"""The dtypes of the tensors that the core can reduce."""

_ALL_DTYPES = sorted(
    {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}, key=str
)

_NUMBER_OF = {dtype: number for number, dtype in enumerate(_ALL_DTYPES)}


def code_of(
    kind: int, dtype: torch.dtype | None = None, op: str | None = None, peer: int = 0, terms: int = 0
) -> int:
    """Return the 64-bit code of a call.

    Args:
        kind: the kind of the operation, a member of `Kind`.
        dtype: the dtype of the tensor. Pass None for a barrier.
        op: the reduce operation. Pass None for operations that do not reduce.
        peer: the source rank of a broadcast, or the other rank of a message. Pass 0 for other operations.
        terms: for a message, the number that the core compares, below 65536. It takes the bits of a reduction's dtype
            and operation. Pass 0 for other operations.
    """
    code = kind | terms << 8 | peer << 24
    if dtype is None:
        return code
    code |= _NUMBER_OF[dtype] << 48
    if op is None:
        return code | dtype.itemsize << 40
    itemsize_bytes = dtype.itemsize // _width(dtype)
    return code | _REDUCED_AS[dtype] << 8 | REDUCE_OPS.index(op) << 16 | itemsize_bytes << 40


def reduction_codes(kind: int) -> dict[tuple[torch.dtype, str], int]:
    """Return the codes of all calls of one kind of reduction, by the dtype and the reduce operation."""
    return {(dtype, op): code_of(kind, dtype, op) for dtype in REDUCED_DTYPES for op in REDUCE_OPS}


def core_numel(tensor: Tensor) -> int:
    """Return the number of elements of a tensor, where a complex number counts as two elements, as in the core."""
    return tensor.numel() * _width(tensor.dtype)


def _width(dtype: torch.dtype) -> int:
    """Return 2 for a complex dtype and 1 for other dtypes: the core counts a complex number as two elements."""
    return 2 if dtype.is_complex else 1


def call_of(code: int, numel: int, *, size: int, peer: int | None = None) -> Call:
    """Return a description of a call, for error messages.

    Args:
        code: the 64-bit code of the call, as the core returns it. If the call is a message, the core has
            removed the other rank from the code.
        numel: the number of elements as the core counts them: a complex number counts as two elements in a reduction,
            and a reduce_scatter (unless in place) counts only the part of one rank.
        size: number of ranks.
        peer: the other rank of a message. Pass None for other operations.

    Examples:
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
    elif kind in (Kind.SEND, Kind.RECV) and peer is not None:
        terms = code >> 8 & 0xFFFF
        detail = (
            f"{'to' if kind == Kind.SEND else 'from'} rank {peer}{f', of exchange {terms}' if terms else ''}"
        )
    return Call(kind.words, detail, numel, dtype)


_SPIN_NANOSECONDS = 200_000
"""How long a wait polls in a loop before it sleeps, if there are at least as many CPU cores as ranks.

The core shortens this time while it is of no use.
"""

_NUM_YIELDS = 30
"""How many times a wait yields the processor before it sleeps, if there are fewer CPU cores than ranks."""

_MAX_UNDER_WAY = 256
"""How many operations a lane records before it removes the complete ones. (Usually the wait for an operation does.)"""

_SLOT_BYTES = 2**20
"""The size of the chunks of all ranks in one slot. With many ranks it is larger: a chunk has a smallest size."""


class LaneSizes:
    """The sizes that determine the memory layout of a lane. They are the same on all ranks.

    Args:
        size: number of ranks.
        has_messages: whether the lane reserves the memory that makes large messages between two ranks fast.

    Attributes:
        num_slots: the largest number of chunks that can be under way at the same time.
        chunk_bytes: size of one rank's chunk in one slot. The chunks of all ranks should fit in the L2 caches.
        message_bytes: size of the pieces into which a message between two ranks is cut.
        total_bytes: size of the memory of the lane.
        populated_bytes: how much of it small collectives use first. The rest is for large tensors and messages, so its
            pages are allocated at their first use.
    """

    def __init__(self, size: int, *, has_messages: bool = True) -> None:
        self.num_slots = 8
        least = 128 * 1024 if size <= 16 else 64 * 1024
        self.chunk_bytes = max(least, _SLOT_BYTES // size // 4096 * 4096)
        most = 256 * 1024 if has_messages else 8 * 1024
        self.message_bytes = min(most, max(2048, 2**20 // size**2 // 128 * 128))
        self.total_bytes: int = library().lane_bytes(
            size, self.num_slots, self.chunk_bytes, self.message_bytes
        )
        self.populated_bytes: int = library().lane_bytes(size, 1, self.chunk_bytes, 0)


class Engine:
    """This rank's handle of a group in the native core.

    Args:
        memory: shared memory of `Engine.num_bytes(size)` bytes, which all ranks have mapped.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, memory: SharedMemory, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.memory = memory
        spin, num_yields = (_SPIN_NANOSECONDS, 0) if size <= num_cores() else (0, _NUM_YIELDS)
        self.handle = library().group_open(memory.address, rank, size, spin, num_yields)
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library().group_close, self.handle).atexit = False

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the size of the shared memory that a group of `size` ranks needs."""
        num_bytes: int = library().group_bytes(size)
        return num_bytes

    def abort(self, text: str) -> None:
        """End the group on all ranks, and wake up all waits.

        The group keeps `text` as the reason, unless it has been aborted already.
        """
        data = text.encode()[:MAX_ABORT_BYTES]
        library().abort(self.handle, data, len(data))

    def abort_text(self) -> str | None:
        """Return the text of the first `abort` on any rank. Returns None if no rank has called `abort`."""
        buffer = ctypes.create_string_buffer(MAX_ABORT_BYTES)
        num_bytes = library().abort_text(self.handle, buffer)
        return None if num_bytes < 0 else buffer.raw[:num_bytes].decode(errors="replace")


class EngineLane:
    """This rank's handle of a lane in the native core, which matches the operations of each lane separately.

    Args:
        engine: this rank's handle of the group.
        memory: shared memory, which all ranks have mapped.
        sizes: the layout of the lane in `memory`.
        begin: where the `sizes.total_bytes` bytes of the lane begin in `memory`.
    """

    def __init__(self, engine: Engine, memory: SharedMemory, sizes: LaneSizes, begin: int = 0) -> None:
        self.engine = engine
        self.sizes = sizes
        self.handle = library().lane_open(
            engine.handle, memory.address + begin, sizes.num_slots, sizes.chunk_bytes, sizes.message_bytes
        )
        if not self.handle:
            raise MemoryError
        self.under_way: dict[tuple[int, int], list[UntypedStorage]] = {}
        """The memory that the core uses for each operation under way, by the queue and the ticket of the operation.

        These are storages, because a reference to a tensor could keep this lane alive.
        """
        # A garbage collection can free a lane and its memory in any order, while another thread still advances the
        # operations on all lanes. So the memory is kept until the lane is closed.
        memories = (memory, engine.memory, self.under_way)
        weakref.finalize(self, _close, library().lane_close, self.handle, memories).atexit = False

    def keep(self, queue: int, ticket: int, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of `tensors` until an operation is complete, even if no thread waits for it.

        Args:
            queue: the number by which the core knows the queue of the operation.
            ticket: the number by which the core knows the operation.
            tensors: the tensors that the operation uses.
        """
        self.under_way[queue, ticket] = [tensor.untyped_storage() for tensor in tensors]
        if len(self.under_way) > _MAX_UNDER_WAY:
            for key in list(self.under_way):
                if library().poll(self.handle, *key) == Outcome.DONE:
                    self.under_way.pop(key, None)

    def called(self) -> list[tuple[int, int]]:
        """Return a pair (code, numel) for the call of each rank, after the core has found that the calls differ.

        For a message, return only the pairs of this rank and its peer.
        """
        pairs = (ctypes.c_uint64 * (2 * max(2, self.engine.size)))()
        num = library().called(self.handle, pairs)
        return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(num)]

    def queue_of_sends(self, dst: int) -> int:
        """Return the number of the core's queue for messages to rank `dst`."""
        return 1 + dst

    def queue_of_receives(self, src: int) -> int:
        """Return the number of the core's queue for messages from rank `src`."""
        return 1 + self.engine.size + src


def _close(close: Callable[[int], None], handle: int, memories: object) -> None:
    """Close a handle of the core by the function `close`.

    This function does not use `memories`. But the finalizer that calls this function holds `memories` as an argument.
    So the memory stays alive until the handle is closed.
    """
    close(handle)


# ---------------------------------------------------------------------- tensors in shared memory


IN_PLACE_BYTES = 64 * 1024
"""The smallest size of a tensor that is reduced in place. For smaller tensors, copies to a lane's memory are faster."""

_MIN_STRIDE_BYTES = 4096


class Region(NamedTuple):
    """A region of shared memory that contains one tensor per rank. The core reduces these tensors in place.

    The fields are arguments of the core's function `start_in_place`.
    """

    address: int
    """The address of the tensor of rank 0."""
    stride_bytes: int
    """The distance between the tensors of consecutive ranks."""
    token: int
    """A random number that identifies the region. It is the same on all ranks."""


class Regions:
    """The allocator of a group's tensors in shared memory. All lanes of the group use the same object.

    Args:
        hub: the connections between the ranks of the group.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.of: dict[int, Region] = {}
        """The regions of the tensors that the core reduces in place, by the `id` of the tensor."""

    def allocate(self, numel: int, dtype: torch.dtype, token: bytes) -> Tensor:
        """Return a new flat tensor of zeros for this rank; a collective call.

        If the tensor has at least `IN_PLACE_BYTES`, it is in shared memory, and the core reduces it in place.

        Args:
            numel: number of elements.
            dtype: dtype of the tensor.
            token: random bytes that identify the tensor. They are the same on all ranks.
        """
        if numel * dtype.itemsize < IN_PLACE_BYTES:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        stride = -(-numel * dtype.itemsize // _MIN_STRIDE_BYTES) * _MIN_STRIDE_BYTES
        purpose = f"{numel} elements of {dtype}"
        memory = self._hub.allocate(self._hub.size * stride, purpose)
        region = Region(memory.address, stride, int.from_bytes(token[:8], "little"))
        tensor = torch.frombuffer(memory.map, dtype=dtype, count=numel, offset=self._hub.rank * stride)
        self._add(tensor, region)
        return tensor  # the mapping lives as long as the tensor

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        """Return a view of the first `numel` elements of `tensor`.

        If the core reduces `tensor` in place, it reduces the view in place, too.
        """
        part = tensor[:numel]
        region = self.of.get(id(tensor))
        if region is not None:
            self._add(part, region)
        return part

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros in memory that all ranks have mapped; a collective call."""
        purpose = f"{numel} elements of {dtype}, one copy for all ranks"
        memory = self._hub.allocate(max(1, numel) * dtype.itemsize, purpose)
        # Only the tensor keeps the mapping alive.
        return torch.frombuffer(memory.map, dtype=dtype, count=max(1, numel))[:numel]

    def _add(self, tensor: Tensor, region: Region) -> None:
        """Record the region of `tensor` for as long as the tensor exists. So the core reduces the tensor in place."""
        self.of[id(tensor)] = region
        weakref.finalize(tensor, self.of.pop, id(tensor), None).atexit = False
