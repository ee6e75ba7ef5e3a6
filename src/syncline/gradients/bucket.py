"""One bucket of gradients: its flat tensor, the views of it, and its state in the current backward."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline._torch.tensors import foreach_copy_
from syncline.errors import SynclineError
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.comm_hook import CommHook, GradBucket
from syncline.gradients.shard import BucketShard, view_like
from syncline.transport.base import Transport
from syncline.transport.work import Work


class BucketState(enum.Enum):
    """The state of a bucket in the current backward."""

    FILLING = "filling"
    """Waiting for gradients of this backward; the flat tensor belongs to this rank."""
    IN_FLIGHT = "in flight"
    """Handed to the transport; nothing else may touch the flat tensor."""
    REDUCED = "reduced"
    """The flat tensor holds the sum over all ranks, until the next backward."""


_ALLOWED_MOVES: dict[BucketState, frozenset[BucketState]] = {
    BucketState.FILLING: frozenset({BucketState.IN_FLIGHT, BucketState.FILLING}),
    BucketState.IN_FLIGHT: frozenset({BucketState.REDUCED}),
    BucketState.REDUCED: frozenset({BucketState.FILLING}),
}


class Lifecycle:
    """The common part of all kinds of buckets: members, state, and the data that the ledger records.

    Args:
        plan: the layout of the parameters.
        members: the parameters of the plan, in its order.
    """

    is_sparse = False

    def __init__(self, plan: BucketPlan, members: Sequence[Tensor]) -> None:
        self.plan = plan
        self.members = list(members)
        self.num_pending = len(self.members)
        self.state = BucketState.FILLING
        self.trigger: int | None = None
        """The parameter whose gradient completed the bucket; None if the end of backward completed it."""
        self.launched_at = 0.0
        self.waited_seconds = 0.0

    def reset(self) -> None:
        """Prepare for the next backward. Refused while the transport holds the bucket."""
        self._transition(BucketState.FILLING)
        self.num_pending = len(self.members)

    def _transition(self, to: BucketState) -> None:
        assert to in _ALLOWED_MOVES[self.state], f"bucket {self.plan.index}: {self.state} -> {to}"
        self.state = to


class Bucket(Lifecycle):
    """The flat tensor of one `BucketPlan`, which is filled, reduced and handed out in each backward.

    Args:
        plan: the layout of the parameters.
        parameters: all parameters of the module, by index.
        transport: the transport that reduces the flat tensor.
        as_view: whether `.grad` becomes the view of the flat tensor, instead of getting its values copied.
        comm_hook: a hook that reduces the flat tensor in place of the transport's all_reduce.
        is_last: the value of the hook's `is_last`.
        in_place: allocate the flat tensor with the transport, which makes construction a collective call.
        memory: a flat tensor whose front is used, and which earlier buckets use too; None to allocate one.
        predecessor: the last bucket that used this memory; `fill` waits for it.
        shared_names: all parameters' names, by index, if each rank is to reduce only its shard of the bucket; this
            makes construction a collective call as well.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        transport: Transport,
        *,
        as_view: bool = False,
        comm_hook: CommHook | None = None,
        is_last: bool = False,
        in_place: bool = False,
        shared_names: Sequence[str] | None = None,
        memory: Tensor | None = None,
        predecessor: Bucket | None = None,
    ) -> None:
        super().__init__(plan, [parameters[i] for i in plan.parameters])
        self._transport = transport
        self._as_view = as_view
        self._comm_hook = comm_hook
        self._is_last = is_last
        first = self.members[0]
        dtype: torch.dtype = getattr(torch, plan.dtype)
        numel = plan.numel + plan.padding_numel + plan.tail_numel
        if memory is not None:
            self.flat = transport.narrow(memory, numel)
        else:
            allocate = transport.allocate if in_place else _zeros
            self.flat = allocate(numel, dtype, first.device)
        self._predecessor = predecessor
        self.shard: BucketShard | None = None
        if shared_names is not None:
            names = [shared_names[index] for index in plan.parameters]
            self.shard = BucketShard(
                plan, self.members, names, self.flat, transport, outlives_bucket=memory is not None
            )
        self.views = [
            view_like(self.flat, offset, parameter)
            for offset, parameter in zip(plan.offsets, self.members, strict=True)
        ]
        self.num_large = plan.num_large
        small_from = plan.offsets[plan.num_large] if plan.num_large < len(plan.offsets) else plan.numel
        # Slices are kept because creating one costs more than many of the operations on it.
        self._small_members = self.members[plan.num_large :]
        self._small_views = self.views[plan.num_large :]
        self._small_flat = self.flat[small_from : plan.numel]
        # In the real view, real and imaginary parts are separate elements. Control digits are real, and a complex
        # division rounds where a real one would not.
        real = torch.view_as_real(self.flat) if dtype.is_complex else self.flat
        self._gradients_flat = real[: plan.numel]
        self._tail = real[plan.numel + plan.padding_numel :].flatten()
        self._work: Work | None = None
        self._future: torch.futures.Future[Any] | None = None

    def view_of(self, position: int) -> Tensor | None:
        """Return the view into which the gradient of member `position` is copied once ready; None for a small one."""
        return self.views[position] if position < self.num_large else None

    def fill(self, scale: float, missing: frozenset[int]) -> None:
        """Fill the rest of the flat tensor. Afterwards it holds this rank's gradients and may be read."""
        if self._predecessor is not None:
            self._predecessor.wait()
        self._fill_small(scale, any_missing=bool(missing))
        if missing:
            self._fill_missing_large(missing, scale)
        if self.shard is not None:
            self.shard.take_over()

    def send(self, *, tail: Sequence[int] | None, trigger: int | None) -> None:
        """Hand the flat tensor to the transport, with `tail` behind the gradients.

        Args:
            tail: control data; None if this bucket carries none.
            trigger: the parameter whose gradient completed the bucket; None if the end of backward completed it.
        """
        self.trigger = trigger
        if tail is not None:
            if any(tail):
                self._tail[: len(tail)] = torch.tensor(tail, dtype=self._tail.dtype, device=self._tail.device)
            else:  # nothing to report, as in almost every step
                self._tail.zero_()
        self._transition(BucketState.IN_FLIGHT)
        self.launched_at = time.perf_counter()
        if self.shard is not None:
            self._work = self._transport.reduce_spans(self.flat, self.shard.bounds, "sum")
            return
        if self._comm_hook is None:
            self._work = self._transport.all_reduce(self.flat, "sum")
            return
        bucket = GradBucket(
            index=self.plan.index,
            buffer=self.flat,
            parameters=self.members,
            gradients=self.views,
            is_last=self._is_last,
        )
        self._future = self._comm_hook(bucket)

    def launch_zeros(self, *, tail: Sequence[int] | None) -> None:
        """Send zeros, on a rank that has no inputs left. `.grad` stays as it is."""
        if self._as_view:  # the values of `.grad` must not change, so it needs memory of its own
            self.give_back_views()
        self.flat.zero_()
        self.send(tail=tail, trigger=None)

    def give_back_views(self) -> None:
        """Replace each `.grad` that is a view of the flat tensor by a copy."""
        for parameter, view in zip(self.members, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def _fill_small(self, scale: float, *, any_missing: bool) -> None:
        """Copy the small gradients into place, times `scale`; a missing one counts as zero."""
        if not self._small_members:
            return
        gradients = [parameter.grad for parameter in self._small_members]
        if not any_missing:
            try:
                # One batched call. If a gradient already is its view, copying it onto itself does nothing.
                foreach_copy_(self._small_views, gradients)
            except TypeError:  # an undefined gradient: its hook ran, but `.grad` is None
                any_missing = True
        if any_missing:
            for view, gradient in zip(self._small_views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
        if scale != 1.0:
            self._small_flat.mul_(scale)

    def _fill_missing_large(self, missing: frozenset[int], scale: float) -> None:
        """Fill the places of large parameters whose gradients were not ready in this backward.

        Gradients that earlier backwards without synchronization left in `.grad` are used; a `.grad` of None counts as
        zero.
        """
        for index, parameter, view in zip(
            self.plan.parameters[: self.num_large], self.members, self.views, strict=False
        ):
            if index not in missing:
                continue
            copy_scaled(view, parameter.grad, scale)

    def wait(self) -> None:
        """Block until the flat tensor holds the sum or the hook's result."""
        if self.state is BucketState.REDUCED:  # already waited for, because a later bucket needed its memory
            return
        start = time.perf_counter()
        if self._work is not None:
            self._work.wait()
        else:
            assert self._future is not None
            self._take(self._future.wait())
        self.waited_seconds = time.perf_counter() - start
        self._work = self._future = None
        self._transition(BucketState.REDUCED)
        if self.shard is not None:
            self.shard.collect()

    def _take(self, result: object) -> None:
        """Take a hook's result: the flat tensor itself, or another with the same number of elements."""
        if isinstance(result, list | tuple) and len(result) == 1:
            (result,) = result
        name = "" if self._comm_hook is None else self._comm_hook.name
        if not isinstance(result, Tensor) or result.numel() != self.flat.numel():
            got = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
            raise SynclineError(
                f"communication hook {name}, bucket {self.plan.index}: expected its future to hold a tensor of "
                f"{self.flat.numel()} elements, got {got}: return the bucket's buffer, reduced"
            )
        if result is not self.flat:
            self.flat.copy_(result.view(-1))

    def own(self) -> Tensor:
        """Return this rank's gradients; valid between `fill` and `send`."""
        return self._gradients_flat

    def own_parts(self) -> list[tuple[int, Tensor]]:
        """Return the views of the same memory, with parameter indices."""
        return list(zip(self.plan.parameters, self.views, strict=True))

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the reduced values as one tensor, and the present `.grad` tensors by parameter index.

        Valid after `hand_out`. The first may have a wider dtype than the second. In a sharded bucket both cover this
        rank's span.
        """
        if self.shard is not None:
            return self.shard.gradient, self.shard.parts()
        gradients = zip(self.plan.parameters, self.members, strict=True)
        return self._gradients_flat, [(i, p.grad) for i, p in gradients if p.grad is not None]

    def read_tail(self) -> list[float]:
        """Return the control data, summed over all ranks."""
        tail: list[float] = self._tail.tolist()
        return tail

    def divide(self, divisor: float) -> None:
        """Divide the reduced gradients."""
        if self.shard is not None:
            self.shard.divide(divisor)
            return
        self._gradients_flat.div_(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        """Set `.grad` of each member to the reduced values.

        Args:
            skip: indices of parameters to leave alone.
            any_missing: whether a member may have no `.grad`.
            keeps_tensor: whether `.grad` stays the same tensor and gets the values copied, even with `as_view`. This is
                necessary if it has a graph (create_graph=True) or another wrapper reduces it too.
        """
        if self.shard is not None:
            self.shard.hand_out(skip, any_missing=any_missing)
            return
        if self._as_view and not keeps_tensor:
            for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
                if index not in skip and parameter.grad is not view:
                    parameter.grad = view
            return
        if not any_missing:
            try:
                foreach_copy_([parameter.grad for parameter in self.members], self.views)
            except TypeError:
                any_missing = True
        if any_missing:
            for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
                if index in skip:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter).copy_(view)
                else:
                    parameter.grad.copy_(view)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def copy_scaled(view: Tensor, gradient: Tensor | None, scale: float) -> None:
    """Set `view` to `gradient * scale` in one pass; in place if the gradient already is the view; None is zero."""
    if gradient is None:
        view.zero_()
    elif gradient is view:
        if scale != 1.0:
            view.mul_(scale)
    elif scale == 1.0:
        view.copy_(gradient)
    elif view.dtype is not gradient.dtype:
        view.copy_(gradient).mul_(scale)  # convert first, so that the product is computed in the view's dtype
    else:
        torch.mul(gradient, scale, out=view)
