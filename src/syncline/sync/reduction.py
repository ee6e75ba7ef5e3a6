"""Reducing many tensors in few collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.plan.packing import plan_pieces
from syncline.sync.tensors import is_plain
from syncline.transport.base import REDUCE_OPS, ReduceOp, Transport, Work, reductions_of, unknown_op

__all__ = ["check_reducible", "reduce_tensors"]

_Piece = tuple[Work, Sequence[Tensor], list[Tensor]]
"""What is under way, the tensors that it is for, and where their values arrive (nowhere else, if that is empty)."""


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


def reduce_tensors(tensors: Sequence[Tensor], transport: Transport, op: ReduceOp) -> Work:
    """Reduce tensors in place, those of one dtype and device together; everything is under way at once.

    Tensors from 1 MiB on travel from where they are, smaller ones packed. A tensor that is not contiguous travels by a
    contiguous copy; one on the CPU by the transport's control device where the engine cannot send from the CPU.

    Args:
        tensors: the same shapes and dtypes on all ranks, in the same order; strides may differ.
        transport: between the ranks.
        op: how; see `check_reducible`.

    Returns:
        What to wait for; the tensors are not to be touched before.
    """
    if transport.size == 1:
        return _Reduction([], [])
    places = [(tensor.dtype, transport.sending_device(tensor.device)) for tensor in tensors]
    sizes_bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    pieces: list[_Piece] = []
    for piece in plan_pieces(sizes_bytes, places):
        members = [tensors[i].data for i in piece]
        device = places[piece[0]][1]
        flat, views = _packed(members, device)
        pieces.append((transport.all_reduce(flat, op), members, views))
    return _Reduction(pieces, [tensor for tensor in tensors if tensor.numel()])


def _packed(members: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """What travels, and the part of it for each member; none where the member itself travels."""
    first = members[0]
    if len(members) == 1 and is_plain(first) and first.device == device:
        return first.view(-1), []
    flat = torch.empty(sum(member.numel() for member in members), dtype=first.dtype, device=device)
    parts = flat.split([member.numel() for member in members])
    views = [part.view(member.shape) for part, member in zip(parts, members, strict=True)]
    for view, member in zip(views, members, strict=True):
        view.copy_(member)
    return flat, views


class _Reduction(Work):
    """Pieces under way; `wait` writes what arrives, piece by piece."""

    __slots__ = ("_pieces", "_written")

    def __init__(self, pieces: list[_Piece], written: Sequence[Tensor]) -> None:
        self._pieces = pieces
        self._written = written

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self._pieces:
            return
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._pieces:
            work, members, views = self._pieces[0]
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for member, view in zip(members, views, strict=bool(views)):
                member.copy_(view)
            self._pieces.pop(0)
        # A backward through a graph that saved one of the tensors before is torch's usual error.
        torch.autograd.graph.increment_version(self._written)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work, *_ in self._pieces)
