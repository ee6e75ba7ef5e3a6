"""The layout of gradients in buckets.

Buckets are laid out at the start, and once more in the order in which gradients were ready in the first backward.
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
from syncline.gradients.shard import BucketShard
from syncline.gradients.shard_plan import ALIGNMENT_NUMEL
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.tail import TailForm, TailMessage
from syncline.transport.base import Transport

POOL_BYTES = 96 * 1024 * 1024
"""Memory that sharded buckets use in turn if they need more in total; at least the memory of three buckets."""

_MIN_TURNS = 3


def parameter_specs(
    named_parameters: Sequence[tuple[str, Tensor]], options: GradientOptions
) -> list[ParameterSpec]:
    """Return the facts about the parameters that bucket planning needs."""
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
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
    ) -> None:
        self.buckets: list[Bucket | SparseBucket] = []
        self.places: list[tuple[Bucket | SparseBucket, Tensor | None]] = []
        """By parameter: its bucket, and the view into which its gradient is copied as soon as it is ready (None if it
        is copied at launch). The list stays the same object, because hooks refer to it."""
        self.message: TailMessage | None = None
        """The message that carries the tail if no bucket can; None if the last bucket carries it."""
        self.form = TailForm(
            num_ranks=transport.size,
            widths=(),
            num_tracked=len(named_parameters) if options.allow_unused else 0,
        )
        """The layout of the tail."""
        self.order_is_learnt = False
        self._parameters = [parameter for _, parameter in named_parameters]
        self._specs = parameter_specs(named_parameters, options)
        self._transport = transport
        self._options = options
        self.comm_hook: CommHook | None = None
        """The communication hook that reduces the buckets; None for the transport's all_reduce."""
        self._kinds: list[tuple[Tensor, torch.dtype, torch.device]] = []

    def reserve_tail(self, widths: Sequence[int]) -> None:
        """Reserve space in the tail for one word per rank of each of these widths, in bits.

        Buckets that are already laid out for a tail of another size are laid out again, in the same order. Call it
        between two backwards. It is a collective call if buckets are in memory of the transport.
        """
        form = replace(self.form, widths=tuple(widths))
        if form == self.form:
            return
        self.form = form
        if not self.buckets:
            return  # not laid out yet, or nothing is sent
        if self.message is not None:
            self.message = TailMessage(self._transport, form.numel)
            return
        in_place = self.order_is_learnt and self._transport.reduces_in_place and self.comm_hook is None
        self._build_anew([i for bucket in self.buckets for i in bucket.plan.parameters], in_place=in_place)

    def build(self, comm_hook: CommHook | None) -> None:
        """Lay out the buckets in reverse order of the parameters; a collective call if they are sharded.

        The parameters used last in forward are usually ready first in backward.
        """
        self.comm_hook = comm_hook
        self.order_is_learnt = False
        # Shards keep their place from the start, so these buckets do not wait for an order to be learnt.
        in_place = self._options.sharded and self._transport.reduces_in_place
        self._build(list(reversed(range(len(self._parameters)))), in_place=in_place)

    def learn_order(self, ready: Sequence[int]) -> None:
        """Lay the buckets out again, in the order in which rank 0's gradients were ready.

        This happens once, at the end of the first synchronized backward. Every rank uses rank 0's order, because
        buckets must be the same on all ranks. Only now do the buckets take their memory from the transport, which is a
        collective call. Before, ranks may execute different code (one may copy a wrapped module that the others never
        see).

        Args:
            ready: parameter indices in the order in which this rank's gradients were ready.
        """
        self.order_is_learnt = True
        if self._options.sharded:
            return
        in_place = self._transport.reduces_in_place and self.comm_hook is None
        order = [i for bucket in self.buckets for i in bucket.plan.parameters]
        if len(self.buckets) > 1:
            seen = set(ready)
            rest = [i for i in order if i not in seen]
            sent = torch.tensor([*ready, *rest], device=self._transport.control_device)
            self._transport.broadcast(sent, 0).wait()
            order = sent.tolist()
        elif not in_place:
            return
        self._build_anew(order, in_place=in_place)

    def _build_anew(self, order: Sequence[int], *, in_place: bool) -> None:
        """Build the buckets; replace each `.grad` that was a view of a former bucket by a view of the new one."""
        former_views = {id(view) for bucket in self._dense() for view in bucket.views}
        self._build(order, in_place=in_place)
        if self._options.as_bucket_view:
            for bucket in self._dense():
                for parameter, view in zip(bucket.members, bucket.views, strict=True):
                    if id(parameter.grad) in former_views:
                        parameter.grad = view.copy_(parameter.grad)  # type: ignore[arg-type]

    def give_back_views(self) -> None:
        """Replace each `.grad` that is a view of a bucket by a tensor of its own."""
        for bucket in self._dense():
            bucket.give_back_views()

    def fits(self) -> bool:
        """Return whether the parameters still have the dtype and the device that the buckets were made for.

        Only one parameter per bucket is checked, because a module is converted or moved as a whole.
        """
        return all(p.dtype is dtype and p.device == device for p, dtype, device in self._kinds)

    def _build(self, order: Sequence[int], *, in_place: bool = False) -> None:
        numel = self.form.numel
        # The tail is sent apart from buckets in four cases: a communication hook's buffer must hold gradients only;
        # beside sparse gradients the last dense bucket may be sent too early; the last bucket may be unused and not be
        # sent; and of a sharded bucket each rank reads only its shard.
        sharded = self._options.sharded
        is_apart = (
            self.comm_hook is not None or bool(self._options.sparse) or self._options.skip_unused or sharded
        )
        self.message = TailMessage(self._transport, numel) if is_apart else None
        plans = plan_buckets(
            self._specs,
            order,
            caps=self._options.caps,
            tail_numel=0 if is_apart else numel,
            align_numel=ALIGNMENT_NUMEL if sharded else 1,
            multiple_of=self._num_shards * ALIGNMENT_NUMEL if sharded else 1,
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
                comm_hook=self.comm_hook,
                is_last=plan is plans[-1],
            )
            if plan.sparse
            else Bucket(
                plan,
                self._parameters,
                self._transport,
                as_view=self._has_views(plan.dtype),
                comm_hook=self.comm_hook,
                is_last=plan is plans[-1],
                in_place=in_place,
                shared_names=[spec.name for spec in self._specs] if sharded else None,
            )
            for plan in plans
        ]
        self._note_places()

    @property
    def _num_shards(self) -> int:
        return self._transport.team(self._parameters[0].device).size

    def _pool(self, plans: Sequence[BucketPlan], *, in_place: bool) -> list[Tensor]:
        """Return the memory that sharded buckets use in turn; an empty list if each may have its own memory."""
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
        """Return sharded buckets that use the memory of a pool in turn.

        This is possible because a rank need not keep the parts of a bucket outside of its shard. A bucket is filled
        only when it is launched, because the bucket that used the memory before it is waited for only then.
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
        """Return whether `.grad` can be a view of a bucket; it cannot if the parameters' dtype is another one."""
        if not self._options.as_bucket_view:
            return False
        return all(
            spec.dtype != dtype or str(parameter.dtype) == f"torch.{dtype}"
            for spec, parameter in zip(self._specs, self._parameters, strict=True)
        )

    def shards(self) -> list[BucketShard]:
        """Return this rank's shard of each bucket, in order; an empty list if gradients are not sharded."""
        return [bucket.shard for bucket in self._dense() if bucket.shard is not None]

    def stand_in_of(self, index: int) -> Tensor | None:
        """Return the stand-in for a parameter's `.grad` once that is copied into its bucket; None if there is none."""
        for shard in self.shards():
            if index in shard.plan.parameters:
                return shard.stand_ins[shard.plan.parameters.index(index)]
        return None

    def _dense(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, Bucket)]
