"""One bucket of gradients: a flat tensor, the views of it, and where it stands in the current backward."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.plan.buckets import BucketPlan
from syncline.transport.base import Transport, Work

__all__ = ["Bucket", "BucketState", "copy_scaled"]


class BucketState(enum.Enum):
    """Where a bucket stands in the current backward."""

    FILLING = "filling"
    """Waiting for gradients of this backward; the flat tensor belongs to this rank."""
    IN_FLIGHT = "in flight"
    """Handed to the transport; nobody else may touch the flat tensor."""
    REDUCED = "reduced"
    """The flat tensor holds the sum over all ranks, until the next backward."""


_ALLOWED_MOVES: dict[BucketState, frozenset[BucketState]] = {
    BucketState.FILLING: frozenset({BucketState.IN_FLIGHT, BucketState.FILLING}),
    BucketState.IN_FLIGHT: frozenset({BucketState.REDUCED}),
    BucketState.REDUCED: frozenset({BucketState.FILLING}),
}


class Bucket:
    """Owns the flat tensor of one `BucketPlan`.

    Args:
        plan: which parameters lie where.
        parameters: all parameters of the module, by index.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor]) -> None:
        first = parameters[plan.parameters[0]]
        self.plan = plan
        self.members = [parameters[i] for i in plan.parameters]
        self.flat = torch.zeros(plan.numel + plan.tail_numel, dtype=first.dtype, device=first.device)
        self.views = [
            _view_like(self.flat, offset, parameter)
            for offset, parameter in zip(plan.offsets, self.members, strict=True)
        ]
        self.num_large = plan.num_large
        small_from = plan.offsets[plan.num_large] if plan.num_large < len(plan.offsets) else plan.numel
        # Slices are kept because making one costs more than many of the operations on it.
        self._small_members = self.members[plan.num_large :]
        self._small_views = self.views[plan.num_large :]
        self._small_flat = self.flat[small_from : plan.numel]
        # Real and imaginary parts apart: control digits are real, and a complex division rounds where a real one
        # would not.
        real = torch.view_as_real(self.flat) if first.is_complex() else self.flat
        self._gradients_flat = real[: plan.numel]
        self._tail = real[plan.numel :].flatten()
        self.num_pending = len(self.members)
        self.state = BucketState.FILLING
        self.work: Work | None = None
        self.trigger: int | None = None
        """The parameter whose gradient completed the bucket; None where the end of backward did."""
        self.launched_at = 0.0
        self.waited_seconds = 0.0

    def reset(self) -> None:
        """Ready for the next backward. Refused while the transport holds the flat tensor."""
        self._transition(BucketState.FILLING)
        self.num_pending = len(self.members)

    def fill_small(self, scale: float, *, any_missing: bool) -> None:
        """Copy the small gradients into place, times `scale`; a missing one counts as zero."""
        if not self._small_members:
            return
        gradients = [parameter.grad for parameter in self._small_members]
        if any_missing:
            for view, gradient in zip(self._small_views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
        else:
            # One batched call; where a gradient already is its view, copying it onto itself does nothing.
            torch._foreach_copy_(self._small_views, gradients)  # type: ignore[arg-type]
        if scale != 1.0:
            self._small_flat.mul_(scale)

    def fill_missing_large(self, missing: frozenset[int], scale: float) -> None:
        """Fill the places of the large parameters that were not ready in this backward.

        What earlier backwards without synchronization left in `.grad` counts; nothing counts as zero.
        """
        for index, parameter, view in zip(
            self.plan.parameters[: self.num_large], self.members, self.views, strict=False
        ):
            if index not in missing:
                continue
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                copy_scaled(view, gradient, scale)

    def launch(self, transport: Transport, *, tail: Sequence[int] | None, trigger: int | None) -> None:
        """Hand the flat tensor to the transport, `tail` behind the gradients."""
        self.trigger = trigger
        if tail is not None:
            if any(tail):
                self._tail[: len(tail)] = torch.tensor(tail, dtype=self._tail.dtype, device=self._tail.device)
            else:  # nothing to report, as in almost every step
                self._tail.zero_()
        self._transition(BucketState.IN_FLIGHT)
        self.launched_at = time.perf_counter()
        self.work = transport.all_reduce(self.flat, "sum")

    def wait(self) -> None:
        """Block until the flat tensor holds the sum."""
        assert self.work is not None
        start = time.perf_counter()
        self.work.wait()
        self.waited_seconds = time.perf_counter() - start
        self.work = None
        self._transition(BucketState.REDUCED)

    def read_tail(self) -> list[float]:
        """The control data of all ranks, summed."""
        tail: list[float] = self._tail.tolist()
        return tail

    def divide(self, divisor: float) -> None:
        """Divide the reduced gradients."""
        self._gradients_flat.div_(divisor)

    def hand_over_views(self, skip: frozenset[int]) -> None:
        """Make `.grad` of each member its view of the flat tensor; `skip` are parameter indices."""
        for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
            if index not in skip and parameter.grad is not view:
                parameter.grad = view

    def copy_out(self, skip: frozenset[int], *, any_missing: bool) -> None:
        """Copy the reduced gradients into `.grad` of each member; `skip` are parameter indices."""
        if not any_missing:
            torch._foreach_copy_([parameter.grad for parameter in self.members], self.views)  # type: ignore[misc]
            return
        for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
            if index in skip:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)

    def _transition(self, to: BucketState) -> None:
        assert to in _ALLOWED_MOVES[self.state], f"bucket {self.plan.index}: {self.state} -> {to}"
        self.state = to


def copy_scaled(view: Tensor, gradient: Tensor, scale: float) -> None:
    """`view = gradient * scale` in one pass; in place where the gradient already is the view."""
    if gradient is view:
        if scale != 1.0:
            view.mul_(scale)
    elif scale == 1.0:
        view.copy_(gradient)
    else:
        torch.mul(gradient, scale, out=view)


def _view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The part of `flat` for one parameter, with the parameter's strides where these are dense.

    Same strides make the optimizer's fused kernels and autograd's accumulation run on plain memory
    (channels_last weights, say). A parameter with holes or overlaps gets a contiguous view.
    """
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _is_dense(parameter: Tensor) -> bool:
    """Whether the elements fill one block of memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
