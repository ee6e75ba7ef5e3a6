"""A reduction of many tensors in few collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_, split_like
from syncline.tensors.in_flight import run_pieces
from syncline.tensors.packing import CAP_BYTES, plan_pieces
from syncline.tensors.targets import as_flat, is_plain, mark_written, parts_of
from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport, reductions_of, unknown_op
from syncline.transport.work import CombinedWork, Work

_HALVES = (torch.float16, torch.bfloat16)

_Tensors = list[Tensor] | tuple[Tensor, ...]

_Kind = tuple[torch.dtype, torch.device]
"""The dtype and the device of a tensor."""

_Place = tuple[torch.device, torch.dtype]
"""The device from which tensors are sent, and the dtype in which they are sent."""


def check_reducible(named: Sequence[tuple[str, Tensor]], op: str) -> None:
    """Raise an error if a tensor cannot be reduced by `op`. The message contains the tensor's name.

    Raises:
        ValueError: `op` is unknown, or not defined for a tensor's dtype.
    """
    if op not in REDUCE_OPS:
        raise unknown_op(op)
    for name, tensor in named:
        if op not in reductions_of(tensor.dtype):
            raise ValueError(
                f"op={op!r} is not defined for {name}, which has dtype {tensor.dtype}: leave this tensor out, or "
                "convert it to another dtype first (for integers, sum, max and min are defined, but not mean)"
            )


@dataclass(frozen=True)
class _PiecePlan:
    """The plan of one collective of a reduction."""

    members: tuple[int, ...]
    """Indices of the parts of tensors that the collective reduces."""
    numel: int
    device: torch.device
    """The device from which the parts are sent."""
    dtype: torch.dtype
    """The dtype in which the parts are sent."""
    is_copied: bool
    """Whether a copy of the parts is sent. Otherwise a single part is sent from its own memory."""
    has_pending: bool
    """Whether any part has a pending conjugation or negation."""


class ReductionPlan:
    """A plan that says which tensors are sent alone and which are packed.

    It depends on the shapes, dtypes, devices and strides of the tensors. It holds no tensor, so it can be used again
    for other tensors of the same form.

    Args:
        tensors: the tensors. None of them is empty.
        places: the device and the dtype that are used to send tensors, by the tensors' own dtype and device.
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
            is_copied=(
                len(parts) > 1 or not is_plain(first) or first.device != device or first.dtype is not dtype
            ),
            has_pending=any(part.is_conj() or part.is_neg() for part in parts),
        )

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Divide the tensors into parts. The indices in `_PiecePlan.members` refer to these parts.

        The parts are views of the tensors' memory without their graph and version counter, so it is always allowed to
        write to them.
        """
        data = [tensor.data for tensor in tensors]
        if not self._is_cut:
            return data
        return [part for tensor in data for part in parts_of(tensor, CAP_BYTES)]


class TensorReducer:
    """A reduction of tensors over ranks, in place. Every rank gets the same bits.

    A tensor of 1 MiB or more is sent from its own memory, in parts of up to 32 MiB. Smaller tensors of the same dtype
    and device are packed. A tensor that is not contiguous is sent as a contiguous copy. If the transport cannot send
    from the CPU, a CPU tensor is copied to its control device and sent from there.

    Args:
        tensors: the tensors to reduce, of the same shapes and dtypes on all ranks, in the same order. Strides may
            differ.
        transport: the transport between the ranks.
        op: the reduction, which must be defined for the tensors (see `check_reducible`).
        fraction: the factor by which this rank's values are multiplied before the reduction (its weight divided by the
            sum of all weights). With 0 no value of this rank counts, not even NaN. Pass None if ranks have no weights.
        divisor: the number by which the result is divided.
        rounds_once: whether to add, scale and divide 16-bit floats in fp32. They are then also sent as fp32, unless
            nothing is scaled and the transport adds them in fp32 anyway.
        plan: the plan of an earlier reducer of tensors of the same form. If its places do not fit, a new plan is made.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x, y = torch.full((2,), float(transport.rank)), torch.ones(1)
        ...     TensorReducer([x, y], transport, "sum", fraction=0.25 + 0.5 * transport.rank).run()
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
        fraction: float | None = None,
        divisor: float = 1.0,
        rounds_once: bool = False,
        plan: ReductionPlan | None = None,
    ) -> None:
        self._transport = transport
        self._op: ReduceOp = op
        does_something = transport.size > 1 or divisor != 1.0
        self._written = [tensor for tensor in tensors if tensor.numel()] if does_something else []
        is_rounded = rounds_once and not (fraction is None and divisor == 1)

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
        self._pieces = [
            _ReducedPiece(parts, piece, fraction=fraction, divisor=divisor) for piece in plan.pieces
        ]

    def start(self) -> Work:
        """Start to reduce the tensors. All collectives are in flight at once.

        The tensors must not be used until the returned work has been waited for.
        """
        return CombinedWork(
            [(piece.launch(self._transport, self._op), piece.land) for piece in self._pieces],
            at_end=partial(mark_written, self._written),
        )

    def run(self) -> None:
        """Reduce the tensors, and wait. At most two packed copies of up to 32 MiB exist at a time."""
        try:
            run_pieces(
                self._pieces, lambda piece: piece.launch(self._transport, self._op), _ReducedPiece.land
            )
        finally:
            mark_written(self._written)


class _ReducedPiece:
    """The parts of tensors in one collective, which reduces them in place or as a copy."""

    def __init__(
        self, parts: Sequence[Tensor], plan: _PiecePlan, *, fraction: float | None, divisor: float
    ) -> None:
        self._members = [parts[i] for i in plan.members]
        self._plan = plan
        self._fraction = fraction
        self._divisor = divisor
        self.is_copied = plan.is_copied
        self._wire: Tensor | None = None
        self._views: _Tensors = ()

    def launch(self, transport: Transport, op: ReduceOp) -> Work:
        """Copy and scale this rank's values, and start the collective."""
        if self.is_copied:
            wire = torch.empty(self._plan.numel, dtype=self._plan.dtype, device=self._plan.device)
            # One view per member, in its shape, made in one call.
            self._views = split_like(wire, self._members)
        else:
            wire = as_flat(self._members[0])
        with torch.inference_mode():  # it allows writing to any tensor, including inference tensors
            if self._fraction == 0:
                wire.zero_()
            else:
                if self.is_copied:
                    self._copy(self._views, self._members)
                if self._fraction is not None and self._fraction != 1:
                    wire.mul_(self._fraction)
        self._wire = wire
        return transport.all_reduce(wire, op)

    def land(self) -> None:
        """Divide the result, write it into the tensors, and free the copy."""
        assert self._wire is not None
        with torch.inference_mode():  # see `launch`
            if self._divisor != 1:
                self._wire.div_(self._divisor)
            if self.is_copied:
                self._copy(self._members, self._views)
        self._wire, self._views = None, ()

    def _copy(self, targets: _Tensors, sources: _Tensors) -> None:
        """Copy each tensor of `sources` to the tensor with the same index in `targets`."""
        if self._plan.has_pending:
            # One at a time, because the batched call cannot write to a tensor with a pending conjugation.
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            foreach_copy_(targets, sources)
