"""How a call is written in 64 bits: for the native core, which acts by it, and to be put into words again.

From the lowest bits up: kind (8), dtype (8) and operation (8) of a reduction, the other rank (16), bytes of an element
(8), and what the tensor's dtype really is (8), for the core reduces bools as bytes and complex numbers as pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from syncline.transport.base import REDUCE_OPS
from syncline.transport.calls import Call

__all__ = ["REDUCED_DTYPES", "Kind", "call_of", "code_of", "reduction_codes"]


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
