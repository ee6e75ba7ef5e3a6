"""Where each gradient lies: buckets are laid out at the start, and once more in the order that the first backward
has shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from syncline.gradients.bucket import Bucket
from syncline.gradients.bucket_plan import BucketPlan, ParameterSpec, plan_buckets
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.options import GradientOptions
from syncline.gradients.shard import Share
from syncline.gradients.shard_plan import ALIGNMENT_NUMEL
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.tail import TailForm, TailMessage
from syncline.transport.base import Transport

__all__ = ["BucketLayout", "parameter_specs"]


POOL_BYTES = 96 * 1024 * 1024
"""Sharded buckets that are more take turns in this much memory, or in that of three buckets if that is more."""

_MIN_TURNS = 3


def parameter_specs(
    named_parameters: Sequence[tuple[str, Tensor]], options: GradientOptions
) -> list[ParameterSpec]:
    """What bucket planning needs to know of the parameters."""
    specs = []
    for name, parameter in named_parameters:
        dtype = parameter.dtype
        if options.reduce_dtype is not None and dtype.is_floating_point and name not in options.sparse:
            dtype = options.reduce_dtype
        specs.append(
            ParameterSpec(
                name=name,
                numel=parameter.numel(),
                itemsize_bytes=dtype.itemsize,
                dtype=str(dtype).removeprefix("torch."),
                device=str(parameter.device),
                sparse=name in options.sparse,
                delayed=name in options.delayed,
            )
        )
    return specs


class BucketLayout:
    """The buckets of some parameters; the same on all ranks. Empty until `build`.

    Args:
        named_parameters: the parameters, each once.
        transport: what the buckets travel by.
        options: how.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
    ) -> None:
        self.buckets: list[Bucket | SparseBucket] = []
        self.places: list[tuple[Bucket | SparseBucket, Tensor | None]] = []
        """By parameter: its bucket, and where its gradient is copied as soon as it is ready (None: at launch). The
        list stays the same object, for hooks hold on to it."""
        self.control: TailMessage | None = None
        """What carries the tail where no bucket can."""
        self.form = TailForm(
            num_ranks=transport.size,
            widths=(),
            num_tracked=len(named_parameters) if options.allow_unused else 0,
        )
        """How the tail is laid out."""
        self.order_is_learnt = False
        self._parameters = [parameter for _, parameter in named_parameters]
        self._specs = parameter_specs(named_parameters, options)
        self._transport = transport
        self._options = options
        self._comm_hook: CommHook | None = None
        self._kinds: list[tuple[Tensor, torch.dtype, torch.device]] = []

    def reserve_tail(self, widths: Sequence[int]) -> None:
        """Let the tail hold one word of each rank for each of these widths, in bits. Takes effect with `build`."""
        self.form = replace(self.form, widths=tuple(widths))

    def build(self, comm_hook: CommHook | None) -> None:
        """Lay out the buckets: what is used last in forward is usually ready first in backward.

        Of sharded ones this is a collective call.
        """
        self._comm_hook = comm_hook
        self.order_is_learnt = False
        # Shards lie where they lie from the start, so these buckets do not wait for an order to be learnt.
        in_place = self._options.sharded and self._transport.reduces_in_place
        self._build(list(reversed(range(len(self._parameters)))), in_place=in_place)

    def learn_order(self, ready: Sequence[int]) -> None:
        """Lay the buckets out anew in the order in which rank 0's gradients were ready.

        Once, at the end of the first synchronized backward; every rank gets rank 0's order, because buckets must
        be the same everywhere. Only now do they take their memory from the transport: before, ranks need not be at
        the same place (one may copy a wrapped module that the others never see).

        Args:
            ready: parameter indices in the order of this rank's gradients.
        """
        self.order_is_learnt = True
        if self._options.sharded:
            return
        in_place = self._transport.reduces_in_place and self._comm_hook is None
        order = [i for bucket in self.buckets for i in bucket.plan.parameters]
        if len(self.buckets) > 1:
            seen = set(ready)
            rest = [i for i in order if i not in seen]
            told = torch.tensor([*ready, *rest], device=self._transport.control_device)
            self._transport.broadcast(told, 0).wait()
            order = told.tolist()
        elif not in_place:
            return
        self._build_anew(order, in_place=in_place)

    def build_again(self) -> None:
        """Lay the buckets out again for a tail of another size, in the same order, between two backwards.

        A collective call where buckets lie in memory of the transport.
        """
        if not self.buckets:
            return  # nothing is sent
        if self.control is not None:
            self.control = TailMessage(self._transport, self.form.numel)
            return
        in_place = self.order_is_learnt and self._transport.reduces_in_place and self._comm_hook is None
        self._build_anew([i for bucket in self.buckets for i in bucket.plan.parameters], in_place=in_place)

    def _build_anew(self, order: Sequence[int], *, in_place: bool) -> None:
        """Build the buckets, and let `.grad` that was a view of a former bucket be one of the new bucket."""
        former_views = {id(view) for bucket in self._dense() for view in bucket.views}
        self._build(order, in_place=in_place)
        if self._options.as_bucket_view:
            for bucket in self._dense():
                for parameter, view in zip(bucket.members, bucket.views, strict=True):
                    if id(parameter.grad) in former_views:
                        parameter.grad = view.copy_(parameter.grad)  # type: ignore[arg-type]

    def give_back_views(self) -> None:
        """Let `.grad` be a tensor of its own where it is a view of a bucket."""
        for bucket in self._dense():
            bucket.give_back_views()

    def fits(self) -> bool:
        """Whether the parameters are still of the type and on the device that the buckets were made for.

        Looks at one parameter a bucket: a module moves as a whole.
        """
        return all(p.dtype is dtype and p.device == device for p, dtype, device in self._kinds)

    def _build(self, order: Sequence[int], *, in_place: bool = False) -> None:
        numel = self.form.numel
        # A hook's buffer holds gradients alone. Beside sparse ones the last dense bucket may be gone too early. And
        # where unused buckets are not sent, the last one may be such. Of a sharded one each rank reads a part only.
        sharded = self._options.sharded
        is_apart = (
            self._comm_hook is not None or bool(self._options.sparse) or self._options.skip_unused or sharded
        )
        self.control = TailMessage(self._transport, numel) if is_apart else None
        plans = plan_buckets(
            self._specs,
            order,
            caps=self._options.caps,
            tail_numel=0 if is_apart else numel,
            align_numel=ALIGNMENT_NUMEL if sharded else 1,
            multiple_of=self._num_shares * ALIGNMENT_NUMEL if sharded else 1,
        )
        if sharded and (pool := self._pool(plans, in_place=in_place)):
            self.buckets = self._take_turns(plans, pool)
            self._note_places()
            return
        self.buckets = [
            SparseBucket(
                plan,
                self._parameters,
                self._transport,
                comm_hook=self._comm_hook,
                is_last=plan is plans[-1],
            )
            if plan.sparse
            else Bucket(
                plan,
                self._parameters,
                self._transport,
                as_view=self._has_views(plan.dtype),
                comm_hook=self._comm_hook,
                is_last=plan is plans[-1],
                in_place=in_place,
                shared_names=[spec.name for spec in self._specs] if sharded else None,
            )
            for plan in plans
        ]
        self._note_places()

    @property
    def _num_shares(self) -> int:
        return self._transport.team(self._parameters[0].device).size

    def _pool(self, plans: Sequence[BucketPlan], *, in_place: bool) -> list[Tensor]:
        """Memory for sharded buckets to take turns in; none where all of them may have their own."""
        kinds = {(plan.dtype, plan.device) for plan in plans}
        largest = max(plans, key=lambda plan: plan.payload_bytes)
        num_turns = max(_MIN_TURNS, POOL_BYTES // max(1, largest.payload_bytes))
        if len(kinds) > 1 or len(plans) <= num_turns:
            return []
        dtype: torch.dtype = getattr(torch, largest.dtype)
        device = self._parameters[largest.parameters[0]].device
        numels = [
            max(plan.numel + plan.padding_numel for plan in plans[turn::num_turns])
            for turn in range(num_turns)
        ]
        if in_place:
            return [self._transport.allocate(numel, dtype, device) for numel in numels]
        return [torch.zeros(numel, dtype=dtype, device=device) for numel in numels]

    def _take_turns(self, plans: Sequence[BucketPlan], pool: Sequence[Tensor]) -> list[Bucket | SparseBucket]:
        """Sharded buckets in the memory of a pool: what a rank does not reduce for itself need not be kept.

        A bucket is filled when it is launched, not before, for only then is the one before it waited for.
        """
        buckets: list[Bucket] = []
        for at, plan in enumerate(plans):
            buckets.append(
                Bucket(
                    replace(plan, num_large=0),
                    self._parameters,
                    self._transport,
                    shared_names=[spec.name for spec in self._specs],
                    memory=pool[at % len(pool)],
                    predecessor=buckets[at - len(pool)] if at >= len(pool) else None,
                )
            )
        return [*buckets]

    def _note_places(self) -> None:
        places: dict[int, tuple[Bucket | SparseBucket, Tensor | None]] = {}
        for bucket in self.buckets:
            for at, index in enumerate(bucket.plan.parameters):
                places[index] = (bucket, bucket.view_of(at))
        self.places[:] = [places[index] for index in range(len(self._parameters))]
        firsts = [bucket.members[0] for bucket in self.buckets]
        self._kinds = [(first, first.dtype, first.device) for first in firsts]

    def _has_views(self, dtype: str) -> bool:
        """Whether `.grad` can be a view of a bucket: not of one in another type than the parameters'."""
        if not self._options.as_bucket_view:
            return False
        return all(
            spec.dtype != dtype or str(parameter.dtype) == f"torch.{dtype}"
            for spec, parameter in zip(self._specs, self._parameters, strict=True)
        )

    def shares(self) -> list[Share]:
        """This rank's share of each bucket, in order; none where nothing is sharded."""
        return [bucket.share for bucket in self._dense() if bucket.share is not None]

    def stand_in_of(self, index: int) -> Tensor | None:
        """What takes the place of a parameter's `.grad` once it is in its bucket; None where nothing does."""
        for share in self.shares():
            if index in share.plan.parameters:
                return share.stand_ins[share.plan.parameters.index(index)]
        return None

    def _dense(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, Bucket)]
