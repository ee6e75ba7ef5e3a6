"""Reducing many tensors in few collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_, split_like
from syncline.tensors.packing import CAP_BYTES, plan_pieces
from syncline.tensors.targets import as_flat, is_plain, mark_written, parts_of
from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport, Work, reductions_of, unknown_op

__all__ = ["ReductionPlan", "TensorReducer", "check_reducible"]


_HALVES = (torch.float16, torch.bfloat16)

_Tensors = list[Tensor] | tuple[Tensor, ...]

_Kind = tuple[torch.dtype, torch.device]
"""Of what type tensors are, and where."""

_Place = tuple[torch.device, torch.dtype]
"""From where they are sent, and as what type."""


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


@dataclass(frozen=True)
class _PiecePlan:
    """One collective."""

    members: tuple[int, ...]
    """Which parts of tensors."""
    numel: int
    device: torch.device
    """From where it is sent."""
    dtype: torch.dtype
    """As what it is sent."""
    travels_in_place: bool
    """One part that lies as it travels; else a copy travels."""
    has_pending: bool
    """Whether a member has a conjugation or a sign that was not yet carried out."""


class ReductionPlan:
    """What travels alone and what is packed: a function of tensors' shapes, dtypes, devices and strides.

    It holds no tensor, and is good for others that are like them.

    Args:
        tensors: not empty ones.
        places: from where tensors of each kind are sent, and as what type.
    """

    def __init__(self, tensors: Sequence[Tensor], places: Mapping[_Kind, _Place]) -> None:
        self.places = places
        parts = [part for tensor in tensors for part in parts_of(tensor.data, CAP_BYTES)]
        self._is_cut = len(parts) > len(tensors)
        where = [(part.dtype, part.device, *places[part.dtype, part.device]) for part in parts]
        sizes_bytes = [part.numel() * place[-1].itemsize for part, place in zip(parts, where, strict=True)]
        self.pieces = [
            self._piece([parts[i] for i in members], members, *where[members[0]][2:])
            for members in plan_pieces(sizes_bytes, where)
        ]

    @staticmethod
    def _piece(
        parts: Sequence[Tensor], members: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> _PiecePlan:
        first = parts[0]
        return _PiecePlan(
            members,
            sum(part.numel() for part in parts),
            device,
            dtype,
            travels_in_place=(
                len(parts) == 1 and is_plain(first) and first.device == device and first.dtype is dtype
            ),
            has_pending=any(part.is_conj() or part.is_neg() for part in parts),
        )

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `members` of the pieces counts; the tensors' memory, without graph and version counter: writing to it
        is always allowed.
        """
        data = [tensor.data for tensor in tensors]
        if not self._is_cut:
            return data
        return [part for tensor in data for part in parts_of(tensor, CAP_BYTES)]


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
        plan: that of an earlier reducer, for tensors that are like these; another is made where it does not fit the
            other arguments.

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
        plan: ReductionPlan | None = None,
    ) -> None:
        self._transport = transport
        self._op: ReduceOp = op
        does_something = transport.size > 1 or divisor != 1.0
        self._written = [tensor for tensor in tensors if tensor.numel()] if does_something else []
        is_rounded = rounds_once and not (share is None and divisor == 1)

        def place_of(kind: _Kind) -> _Place:
            dtype, device = kind
            sent_from = transport.sending_device(device)
            is_widened = dtype in _HALVES and (
                is_rounded or (rounds_once and not transport.rounds_once(sent_from))
            )
            return sent_from, torch.float32 if is_widened else dtype

        kinds = plan.places if plan else {(tensor.dtype, tensor.device) for tensor in self._written}
        places = {kind: place_of(kind) for kind in kinds}
        if plan is None or plan.places != places:
            plan = ReductionPlan(self._written, places)
        self.plan = plan
        parts = plan.parts(self._written)
        self._pieces = [_Piece(parts, piece, share=share, divisor=divisor) for piece in plan.pieces]

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
        self, parts: Sequence[Tensor], plan: _PiecePlan, *, share: float | None, divisor: float
    ) -> None:
        self._members = [parts[i] for i in plan.members]
        self._plan = plan
        self._share = share
        self._divisor = divisor
        self.travels_in_place = plan.travels_in_place
        self._wire: Tensor | None = None
        self._views: _Tensors = ()
        self._work: Work | None = None

    def launch(self, transport: Transport, op: ReduceOp) -> None:
        """Start it."""
        if self.travels_in_place:
            wire = as_flat(self._members[0])
        else:
            wire = torch.empty(self._plan.numel, dtype=self._plan.dtype, device=self._plan.device)
            # The part of each member, in its shape; made in one call.
            self._views = split_like(wire, self._members)
        with torch.inference_mode():  # where any tensor may be written, one that was made in it, too
            if self._share == 0:
                wire.zero_()
            else:
                if not self.travels_in_place:
                    self._copy(self._views, self._members)
                if self._share is not None and self._share != 1:
                    wire.mul_(self._share)
        self._wire = wire
        self._work = transport.all_reduce(wire, op)

    def land(self, timeout_seconds: float | None = None) -> None:
        """Wait, and write what has arrived into the tensors; the copy is freed."""
        assert self._work is not None
        assert self._wire is not None
        self._work.wait(timeout_seconds)
        with torch.inference_mode():  # see `launch`
            if self._divisor != 1:
                self._wire.div_(self._divisor)
            if not self.travels_in_place:
                self._copy(self._members, self._views)
        self._wire, self._views = None, ()

    def _copy(self, targets: _Tensors, sources: _Tensors) -> None:
        """Copy each source to its target."""
        if self._plan.has_pending:
            # One by one: the batched call cannot write to a tensor with a pending conjugation.
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            foreach_copy_(targets, sources)

    @property
    def has_arrived(self) -> bool:
        """Whether `land` would not block."""
        return self._work is not None and self._work.is_completed()


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
            mark_written(self._written)
            self._written = ()

    def is_completed(self) -> bool:
        return all(piece.has_arrived for piece in self._pieces)
