"""Reducing many tensors in few collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.plan.packing import CAP_BYTES, plan_pieces
from syncline.sync.tensors import as_flat, is_plain, parts_of
from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport, Work, reductions_of, unknown_op

__all__ = ["TensorReducer", "check_reducible"]

_HALVES = (torch.float16, torch.bfloat16)

_Tensors = list[Tensor] | tuple[Tensor, ...]

_Place = tuple[torch.dtype, torch.device, torch.dtype]
"""Of what type tensors are, from where they are sent, and as what type."""


def check_reducible(named: Sequence[tuple[str, Tensor]], op: str) -> None:
    """Refuse what cannot be reduced by `op`, by name.

    Raises:
        ValueError: `op` is unknown, or not defined for a tensor's dtype.
    """
    if op not in REDUCE_OPS:
        raise unknown_op(op)
    for name, tensor in named:
        if op not in reductions_of(tensor.dtype):
            raise ValueError(
                f"op={op!r} is not defined for {name}, {tensor.dtype}: leave it out, or convert it first (integers can "
                "be summed, and give their maximum or minimum, but have no mean)"
            )


class TensorReducer:
    """Reduces tensors in place, those of one dtype and device together.

    Tensors from 1 MiB on travel from where they are, in parts of up to 32 MiB; smaller ones are packed. A tensor that
    is not contiguous travels by a contiguous copy; one on the CPU by the transport's control device where the engine
    cannot send from the CPU. Every rank ends with the same bits.

    Args:
        tensors: the same shapes and dtypes on all ranks, in the same order; strides may differ.
        transport: between the ranks.
        op: how; see `check_reducible`.
        share: what this rank's values are multiplied by first; of a rank with 0 nothing counts, not even NaN. None: by
            nothing, on any rank.
        divisor: what the result is divided by.
        rounds_once: add up 16-bit floats in fp32, scaled and divided there, too. As such they travel, unless that is
            what the engine does with them by itself and nothing is scaled.

    Example:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x, y = torch.full((2,), float(transport.rank)), torch.ones(1)
        ...     TensorReducer([x, y], transport, "sum", share=0.25 + 0.5 * transport.rank).run()
        ...     return x.tolist(), y.item(), transport.statistics().num_calls
        >>> run_ranks(2, program)[0]
        ([0.75, 0.75], 1.0, {'all_reduce': 1})
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        transport: Transport,
        op: ReduceOp,
        *,
        share: float | None = None,
        divisor: float = 1.0,
        rounds_once: bool = False,
    ) -> None:
        self._transport = transport
        self._op: ReduceOp = op
        does_something = transport.size > 1 or divisor != 1.0
        self._written = [tensor for tensor in tensors if tensor.numel()] if does_something else []
        is_rounded = rounds_once and not (share is None and divisor == 1)
        parts: list[Tensor] = []
        places: list[_Place] = []
        sizes_bytes: list[int] = []
        place_of: dict[tuple[torch.dtype, torch.device], _Place] = {}
        for tensor in self._written:
            # It shares the memory, but neither graph nor version counter: writing to it is always allowed.
            data = tensor.data
            kind = dtype, device = data.dtype, data.device
            place = place_of.get(kind)
            if place is None:
                device = transport.sending_device(device)
                is_widened = dtype in _HALVES and (
                    is_rounded or (rounds_once and not transport.rounds_once(device))
                )
                place = place_of[kind] = (dtype, device, torch.float32 if is_widened else dtype)
            for part in parts_of(data, CAP_BYTES):
                parts.append(part)
                places.append(place)
                sizes_bytes.append(part.numel() * place[2].itemsize)
        self._pieces = [
            _Piece([parts[i] for i in piece], *places[piece[0]][1:], share=share, divisor=divisor)
            for piece in plan_pieces(sizes_bytes, places)
        ]

    def start(self) -> Work:
        """Reduce, everything under way at once; the tensors are not to be touched before the work was waited for."""
        for piece in self._pieces:
            piece.launch(self._transport, self._op)
        return _Reduction(self._pieces, self._written)

    def run(self) -> None:
        """Reduce and wait, with at most two packed copies of up to 32 MiB at a time."""
        under_way: deque[_Piece] = deque()
        num_copies = 0
        for piece in self._pieces:
            while num_copies == 2 and not piece.travels_in_place:
                oldest = under_way.popleft()
                oldest.land()
                num_copies -= not oldest.travels_in_place
            piece.launch(self._transport, self._op)
            under_way.append(piece)
            num_copies += not piece.travels_in_place
        _Reduction(under_way, self._written).wait()


class _Piece:
    """Tensors of one collective: in place if it is one that lies as it travels, else by a copy."""

    def __init__(
        self,
        members: list[Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        share: float | None,
        divisor: float,
    ) -> None:
        self._members = members
        self._device = device
        self._dtype = dtype
        self._share = share
        self._divisor = divisor
        first = members[0]
        self.travels_in_place = (
            len(members) == 1 and is_plain(first) and first.device == device and first.dtype is dtype
        )
        self._wire: Tensor | None = None
        self._views: _Tensors = ()
        self._work: Work | None = None

    def launch(self, transport: Transport, op: ReduceOp) -> None:
        """Start it."""
        if self.travels_in_place:
            wire = as_flat(self._members[0])
        else:
            numel = sum(member.numel() for member in self._members)
            wire = torch.empty(numel, dtype=self._dtype, device=self._device)
            # The part of each member, in its shape; made in one call.
            self._views = torch._C._nn.unflatten_dense_tensors(wire, self._members)
        if self._share == 0:
            wire.zero_()
        else:
            if not self.travels_in_place:
                _copy(self._views, self._members)
            if self._share is not None and self._share != 1:
                wire.mul_(self._share)
        self._wire = wire
        self._work = transport.all_reduce(wire, op)

    def land(self, timeout_seconds: float | None = None) -> None:
        """Wait, and write what has arrived into the tensors; the copy is freed."""
        assert self._work is not None
        assert self._wire is not None
        self._work.wait(timeout_seconds)
        if self._divisor != 1:
            self._wire.div_(self._divisor)
        if not self.travels_in_place:
            _copy(self._members, self._views)
        self._wire, self._views = None, ()

    @property
    def has_arrived(self) -> bool:
        """Whether `land` would not block."""
        return self._work is not None and self._work.is_completed()


def _copy(targets: _Tensors, sources: _Tensors) -> None:
    """Copy each source to its target."""
    if any(target.is_conj() or target.is_neg() for target in targets):
        # One by one: the batched call cannot write to a tensor with a pending conjugation.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


class _Reduction(Work):
    """Pieces under way; `wait` writes what arrives, piece by piece."""

    __slots__ = ("_pieces", "_written")

    def __init__(self, pieces: Sequence[_Piece] | deque[_Piece], written: Sequence[Tensor]) -> None:
        self._pieces = deque(pieces)
        self._written = written

    def wait(self, timeout_seconds: float | None = None) -> None:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._pieces:
            self._pieces[0].land(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._pieces.popleft()
        if self._written:
            # A backward through a graph that saved one of the tensors before is torch's usual error.
            torch.autograd.graph.increment_version(self._written)
            self._written = ()

    def is_completed(self) -> bool:
        return all(piece.has_arrived for piece in self._pieces)
