"""Buckets, which are groups of gradients that are reduced together. A dense bucket is one flat tensor."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline._torch.autograd import UNPROFILED, is_profiling, profiled
from syncline._torch.tensors import foreach_copy_, gradient_dtype
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.comm_hook import CommHook, GradBucket
from syncline.gradients.copying import copy_scaled
from syncline.gradients.shard import BucketShard, view_like
from syncline.gradients.tail import Tail
from syncline.transport.base import Transport
from syncline.transport.work import Work


class BucketState(enum.Enum):
    """The state of a bucket in the current backward."""

    FILLING = "filling"
    """The bucket waits for gradients of this backward. Only this rank uses its memory."""
    IN_FLIGHT = "in flight"
    """The bucket is being reduced. Only the reduction may use its memory."""
    REDUCED = "reduced"
    """The bucket holds the result of the reduction, until the next backward begins."""

    __hash__ = object.__hash__  # that of enum.Enum is a Python function, and slower


_ALLOWED_MOVES: dict[BucketState, frozenset[BucketState]] = {
    BucketState.FILLING: frozenset({BucketState.IN_FLIGHT, BucketState.FILLING}),
    BucketState.IN_FLIGHT: frozenset({BucketState.REDUCED}),
    BucketState.REDUCED: frozenset({BucketState.FILLING}),
}


class Bucket(ABC):
    """A group of gradients. In each backward they are copied into the bucket, reduced, and handed out together.

    Args:
        plan: the parameters of the bucket, and the place of each gradient in the bucket.
        parameters: all parameters of the module, by index.
    """

    is_sparse = False
    collective = "all_reduce"
    """The operation of the transport that reduces the bucket."""
    views: Sequence[Tensor] = ()
    """One view of the bucket's memory per member; empty for a sparse bucket."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor]) -> None:
        self.plan = plan
        self.members = [parameters[index] for index in plan.parameters]
        """The parameters whose gradients are in the bucket, in the order of the plan."""
        self.state = BucketState.FILLING
        self.num_pending = len(self.members)
        """Number of members whose gradients are not ready yet."""
        self.trigger: int | None = None
        """Index of the parameter whose gradient caused the bucket to be sent; None if no gradient caused this."""
        self.launched_at = 0.0
        self.waited_seconds = 0.0
        self.reduced_at = 0.0
        """The time at which this rank's wait for the result ended."""
        self._work: Work | None = None
        self._comm_hook: CommHook | None = None
        self._is_last = False
        self._operation = self.collective
        self._large_are_finite = True
        """Whether all large gradients were found to be finite when they were copied (see `take`)."""

    def reduce_by(self, comm_hook: CommHook | None, *, is_last: bool) -> None:
        """Choose whether a communication hook or the transport reduces the bucket.

        Args:
            comm_hook: the hook; None for the transport.
            is_last: whether no bucket follows this one. The hook gets this value from `GradBucket.is_last`.
        """
        self._comm_hook, self._is_last = comm_hook, is_last
        self._operation = self.collective if comm_hook is None else f"by hook {comm_hook.name}"

    def reset(self) -> None:
        """Prepare the bucket for the next backward. The last reduction of the bucket must have ended."""
        self._enter(BucketState.FILLING)
        self.num_pending = len(self.members)
        self._large_are_finite = True

    def _enter(self, state: BucketState) -> None:
        assert state in _ALLOWED_MOVES[self.state], f"bucket {self.plan.index}: {self.state} -> {state}"
        self.state = state

    def send(self, *, tail: Tail | None, trigger: int | None) -> None:
        """Start to reduce the bucket over all ranks.

        Args:
            tail: the control data to send behind the gradients; None if this bucket carries no control data.
            trigger: index of the parameter whose gradient caused this call; None at the end of backward.
        """
        self.trigger = trigger
        self._enter(BucketState.IN_FLIGHT)
        self.launched_at = time.perf_counter()
        with profiled("bucket {} {}", self.plan.index, self._operation) if is_profiling() else UNPROFILED:
            self._work = self._start(tail)

    def wait(self) -> None:
        """Block until the bucket holds the result of the reduction."""
        if self.state is BucketState.REDUCED:  # already waited for, because a later bucket needed its memory
            return
        assert self._work is not None
        start = time.perf_counter()
        with profiled("wait bucket {}", self.plan.index) if is_profiling() else UNPROFILED:
            self._work.wait()
        self.reduced_at = time.perf_counter()
        self.waited_seconds = self.reduced_at - start
        self._work = None
        self._enter(BucketState.REDUCED)

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the bucket, which is not used again. Its plan and its times stay known."""

    def _grad_bucket(self, buffer: Tensor, gradients: Sequence[Tensor]) -> GradBucket:
        """Return the `GradBucket` that describes this bucket to a communication hook."""
        return GradBucket(
            index=self.plan.index,
            buffer=buffer,
            parameters=self.members,
            gradients=gradients,
            is_last=self._is_last,
        )

    @abstractmethod
    def fill(self, scale: float, missing: frozenset[int]) -> Sequence[int]:
        """Copy the gradients that are not in the bucket yet, so that it holds all of this rank's gradients.

        A parameter that got no gradient in this backward may have a `.grad` from earlier backwards without
        synchronization. Then this `.grad` is copied. If `.grad` is None, zeros are copied.

        Args:
            scale: the factor by which gradients are multiplied.
            missing: indices of the parameters that got no gradient in this backward.

        Returns:
            The indices of the other parameters for which zeros were copied, because `.grad` is None.
        """

    @abstractmethod
    def _start(self, tail: Tail | None) -> Work:
        """Start to reduce the bucket. The control data `tail` follow the gradients, unless `tail` is None."""

    def take(self, view: Tensor, gradient: Tensor | None, scale: float) -> None:
        """Copy one large gradient, times `scale`, to its place `view` in the bucket."""
        if not copy_scaled(view, gradient, scale):
            self._large_are_finite = False

    @abstractmethod
    def fill_zeros(self) -> None:
        """Fill the bucket with zeros, because this rank has no inputs left. The values of `.grad` do not change."""

    @abstractmethod
    def own(self) -> Tensor:
        """Return the tensor of this rank's own gradients. Call this method between `fill` and `send`."""

    def unchecked(self) -> Tensor:
        """Return that part of `own()` whose values were not found to be finite when they were copied."""
        return self.own()

    @abstractmethod
    def own_parts(self) -> list[tuple[int, Tensor]]:
        """Return this rank's own gradients as pairs (parameter index, gradient), in the memory of `own()`."""

    @abstractmethod
    def divide(self, divisor: float) -> None:
        """Divide the reduced gradients by `divisor`."""

    @abstractmethod
    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        """Set `.grad` of each member to the reduced values.

        Args:
            skip: indices of the parameters whose `.grad` stays as it is.
            any_missing: whether some parameters of the module got no gradient, so that `.grad` of a member may be None.
            keeps_tensor: whether the values are copied into the present tensor in `.grad`, even if `.grad` could become
                a view of the bucket. This is necessary if `.grad` has a graph (create_graph=True), or if another
                wrapper also reduces `.grad`.
        """

    @abstractmethod
    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the reduced values in two forms: one tensor, and a list of pairs (parameter index, values in `.grad`).

        Call this method after `hand_out`. The tensor of the first form may have a wider dtype than the `.grad` tensors.
        For a sharded bucket, each form contains only the values of this rank's span.
        """


class DenseBucket(Bucket):
    """A bucket whose gradients lie in one flat tensor, which one collective sums over the ranks.

    Args:
        plan: the parameters and their places in the flat tensor.
        parameters: all parameters of the module, by index.
        transport: the transport that reduces the flat tensor.
        flat: the flat tensor, which includes the padding and the tail of the plan.
        as_view: whether `.grad` becomes a view of the flat tensor. Otherwise, reduced values are copied into `.grad`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        transport: Transport,
        flat: Tensor,
        *,
        as_view: bool = False,
    ) -> None:
        super().__init__(plan, parameters)
        self._transport = transport
        self._as_view = as_view
        self._small_are_finite = False
        """Whether all small gradients were found to be finite when they were scaled (see `fill`)."""
        self.flat = flat
        self.views: Sequence[Tensor] = [
            view_like(flat, offset, parameter)
            for offset, parameter in zip(plan.offsets, self.members, strict=True)
        ]
        # Slices are kept because creating one costs more than many of the operations on it.
        small_from = plan.offsets[plan.num_large] if plan.num_large < len(plan.offsets) else plan.numel
        self._small = flat[small_from : plan.numel]
        # In the real view, real and imaginary parts are separate elements. Control digits are real, and a complex
        # division rounds where a real one would not.
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        self._gradients = real[: plan.numel]
        self._tail = real[plan.numel + plan.padding_numel :].flatten()

    def fill(self, scale: float, missing: frozenset[int]) -> Sequence[int]:
        num_large = self.plan.num_large
        for index, parameter, view in zip(
            self.plan.parameters[:num_large] if missing else (), self.members, self.views, strict=False
        ):
            if index in missing:
                self.take(view, parameter.grad, scale)
        if num_large == len(self.members):
            return ()
        empty: Sequence[int] = ()
        views, gradients = self.views[num_large:], [p.grad for p in self.members[num_large:]]
        any_missing = bool(missing)
        if not any_missing:
            try:
                # One batched call. If a gradient already is its view, copying it onto itself does nothing.
                foreach_copy_(views, gradients)
            except TypeError:  # an undefined gradient: its hook ran, but `.grad` is None
                any_missing = True
        if any_missing:
            for view, gradient in zip(views, gradients, strict=True):
                copy_scaled(view, gradient, 1.0)
            small = zip(self.plan.parameters[num_large:], gradients, strict=True)
            empty = [index for index, gradient in small if gradient is None and index not in missing]
        self._small_are_finite = copy_scaled(self._small, self._small, scale)
        return empty

    def _start(self, tail: Tail | None) -> Work:
        if tail is not None:
            tail.write(self._tail)
        if self._comm_hook is None:
            return self._transport.all_reduce(self.flat, "sum")
        return self._comm_hook.start(self._grad_bucket(self.flat, self.views), self._take_result)

    def _take_result(self, result: Tensor) -> None:
        if result is not self.flat:
            self.flat.copy_(result.view(-1))

    def fill_zeros(self) -> None:
        if self._as_view:  # the values of `.grad` must not change, so it needs other memory than the bucket
            self.give_back_views()
        self.flat.zero_()

    def give_back_views(self) -> None:
        """Replace each `.grad` that is a view of the flat tensor by a copy in memory of its own."""
        for parameter, view in zip(self.members, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def free(self) -> None:
        self.flat = self._small = self._gradients = self._tail = self.flat.new_empty(0)
        self.views = ()

    def own(self) -> Tensor:
        return self._gradients

    def unchecked(self) -> Tensor:
        if not self._large_are_finite:
            return self._gradients
        return self._gradients[:0] if self._small_are_finite else self._small

    def own_parts(self) -> list[tuple[int, Tensor]]:
        return list(zip(self.plan.parameters, self.views, strict=True))

    def read_tail(self) -> list[float]:
        """Return the control data that follow the gradients in the bucket. They are already summed over all ranks."""
        tail: list[float] = self._tail.tolist()
        return tail

    def divide(self, divisor: float) -> None:
        self._gradients.div_(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        if self._as_view and not keeps_tensor:
            for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
                if index not in skip and parameter.grad is not view:
                    parameter.grad = view
            return
        if not any_missing:
            try:
                foreach_copy_([parameter.grad for parameter in self.members], self.views)
            except TypeError:  # the hook of an undefined gradient ran, but `.grad` is None
                any_missing = True
        if any_missing:
            for index, parameter, view in zip(self.plan.parameters, self.members, self.views, strict=True):
                if index in skip:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
                parameter.grad.copy_(view)

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        members = zip(self.plan.parameters, self.members, strict=True)
        return self._gradients, [(i, p.grad) for i, p in members if p.grad is not None]


class ShardedBucket(DenseBucket):
    """A dense bucket that is divided into shards. Each rank receives the reduced values of its own shard only.

    The constructor is a collective call.

    Args:
        plan: the parameters and their places in the flat tensor.
        parameters: all parameters of the module, by index.
        transport: the transport that reduces the flat tensor.
        flat: the flat tensor, which includes the padding of the plan.
        names: names of all parameters, by index.
        outlives_memory: whether another bucket uses the same memory before the optimizer steps. If so, the reduced
            shard is copied to memory of its own.
        predecessor: the bucket that uses the same memory before this bucket; None if no bucket does. `fill` waits until
            the predecessor is reduced.
    """

    collective = "reduce_scatter"

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        transport: Transport,
        flat: Tensor,
        *,
        names: Sequence[str],
        outlives_memory: bool,
        predecessor: Bucket | None,
    ) -> None:
        super().__init__(plan, parameters, transport, flat)
        own_names = [names[index] for index in plan.parameters]
        self.shard = BucketShard(
            plan, self.members, own_names, flat, transport, outlives_bucket=outlives_memory
        )
        self._predecessor = predecessor

    def fill(self, scale: float, missing: frozenset[int]) -> Sequence[int]:
        if self._predecessor is not None:
            self._predecessor.wait()
        empty = super().fill(scale, missing)
        self.shard.take_over()
        return empty

    def _start(self, tail: Tail | None) -> Work:
        return self._transport.reduce_spans(self.flat, self.shard.bounds, "sum")

    def wait(self) -> None:
        if self.state is BucketState.IN_FLIGHT:
            super().wait()
            self.shard.collect()

    def divide(self, divisor: float) -> None:
        self.shard.divide(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        self.shard.hand_out(skip, any_missing=any_missing)

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        return self.shard.gradient, self.shard.parts()
