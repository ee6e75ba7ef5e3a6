"""The layout of gradients in buckets.

Buckets are laid out at the start, in reverse order of the parameters. They get their memory when the first synchronized
backward begins, because under some strategies no backward is synchronized. After this backward they are laid out once
more, in the order in which its gradients were ready. Sharded buckets are laid out only once, and get their memory at
the start.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from syncline._torch.tensors import gradient_dtype
from syncline.gradients.bucket import Bucket, DenseBucket, ShardedBucket
from syncline.gradients.bucket_plan import POOL_BYTES, BucketPlan, ParameterSpec, plan_buckets
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.options import GradientOptions
from syncline.gradients.shard import BucketShard
from syncline.gradients.shard_plan import ALIGNMENT_NUMEL
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.step_times import NUM_DIGITS
from syncline.gradients.tail import TailForm, TailMessage
from syncline.transport.base import Transport

_MIN_TURNS = 3
"""The pool always has memory for at least this number of buckets at the same time."""

_dtype = operator.attrgetter("dtype")


def parameter_specs(
    named_parameters: Sequence[tuple[str, Tensor]], options: GradientOptions
) -> list[ParameterSpec]:
    """Return one `ParameterSpec` per parameter, with the facts that are needed to plan buckets."""
    specs = []
    name_of = cache(str)  # a few dtypes and devices, for perhaps many parameters
    for name, parameter in named_parameters:
        dtype = gradient_dtype(parameter)
        if options.reduce_dtype is not None and dtype.is_floating_point and name not in options.sparse:
            dtype = options.reduce_dtype
        specs.append(
            ParameterSpec(
                name=name,
                numel=parameter.numel(),
                itemsize_bytes=dtype.itemsize,
                dtype=name_of(dtype).removeprefix("torch."),
                device=name_of(parameter.device),
                sparse=name in options.sparse,
                delayed=name in options.delayed,
            )
        )
    return specs


class BucketLayout:
    """The buckets for a list of parameters, and the place of each gradient in them. All ranks have the same layout.

    There are no plans until `build` is called, and no buckets until `make_buckets` is called.

    Args:
        named_parameters: the names and parameters. Each parameter occurs once.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
    ) -> None:
        self.plans: tuple[BucketPlan, ...] = ()
        """The plan of each bucket."""
        self.buckets: list[Bucket] = []
        """The buckets with their memory; empty until `make_buckets` is called."""
        self.places: list[tuple[Bucket, Tensor | None]] = []
        """For each parameter, its bucket and the view into which its gradient is copied as soon as it is ready. The
        view is None if the gradient is copied at launch. The list stays the same object, because hooks refer to it."""
        self.message: TailMessage | None = None
        """The separate message that carries the tail; None if the last bucket carries the tail."""
        self.form = TailForm(
            num_ranks=transport.size,
            widths=(),
            num_tracked=len(named_parameters) if options.allow_unused else 0,
            num_noted=NUM_DIGITS,
        )
        """The layout of the tail, which carries control data of all ranks."""
        self.order_is_learnt = False
        """Whether the buckets are laid out in the order in which gradients were ready in the first backward."""
        self._parameters = [parameter for _, parameter in named_parameters]
        self._specs = parameter_specs(named_parameters, options)
        self._transport = transport
        self._options = options
        self.comm_hook: CommHook | None = None
        """The communication hook that reduces the buckets; None for the transport's all_reduce."""
        self._kinds: list[tuple[Tensor, torch.dtype | None, torch.device]] = []
        self._dtypes: list[torch.dtype] = []
        self.can_be_freed: bool = not options.sharded
        """Whether `free_unused` may be called, and was not called before."""
        self._converting: set[str] = set()
        """The dtypes of buckets into which gradients of another dtype are converted."""

    def reserve_tail(self, widths: Sequence[int]) -> None:
        """Reserve space in the tail for the words that the riders of each rank send.

        Buckets that are already laid out for a tail of another form are laid out again, in the same order. Call this
        method between two backwards. It is a collective call if the transport allocates the memory of the buckets, and
        they have it already.

        Args:
            widths: the number of bits of each rider's word.
        """
        form = replace(self.form, widths=tuple(widths))
        if form == self.form:
            return
        self.form = form
        if not self.plans:
            return  # not laid out yet, or nothing is sent
        if self.message is not None:
            self.message = TailMessage(self._transport, form.numel)
            return
        self._build_anew(self._order)

    def build(self, comm_hook: CommHook | None, order: Sequence[int] | None = None) -> None:
        """Lay out the buckets, and free the memory of former ones.

        If they are sharded, or if their order is given, they get their memory now, and this is a collective call.

        Args:
            comm_hook: the communication hook that reduces the buckets; None for the transport's all_reduce.
            order: the order that `learn_order` would find, the same on all ranks. None stands for the order that is
                learnt already, or else for the reverse order of the parameters: those that forward uses last usually
                get their gradients first.
        """
        self.comm_hook = comm_hook
        gets_memory = self._options.sharded or order is not None
        if order is None and self.order_is_learnt:
            order = self._order
        self.order_is_learnt = order is not None
        self.free_memory()
        self._lay_out(range(len(self._parameters))[::-1] if order is None else order)
        if gets_memory:
            self.make_buckets()

    def order_of_rank_0(self, transport: Transport) -> list[int] | None:
        """Return the order that rank 0 of a new group has learnt, or None if it has learnt none. A collective call."""
        mine = self._order if self.order_is_learnt and not self._options.sharded else []
        is_learnt_there, *order = _of_rank_0([bool(mine), *(mine or range(len(self._parameters)))], transport)
        return order if is_learnt_there else None

    def learn_order(self, ready: Sequence[int]) -> None:
        """Lay the buckets out again, in the order in which rank 0's gradients were ready.

        This happens once, at the end of the first synchronized backward. Every rank uses rank 0's order, because
        buckets must be the same on all ranks. Only now does the transport allocate the buckets' memory, by a
        collective call, because only now have all ranks waited for each other: a rank may reach its first backward
        much later than another. Sharded buckets are not laid out again. Buckets that would not change are kept.

        Args:
            ready: parameter indices in the order in which this rank's gradients were ready.
        """
        self.order_is_learnt = True
        if self._options.sharded:
            return
        order = self._order
        if len(self.plans) > 1:
            seen = set(ready)
            order = _of_rank_0([*ready, *(i for i in order if i not in seen)], self._transport)
        if self._uses_transport_memory or self._planned(order) != self.plans:
            self._build_anew(order)

    @property
    def _order(self) -> list[int]:
        """The indices of the parameters, in the order of the buckets."""
        return [i for plan in self.plans for i in plan.parameters]

    @property
    def _uses_transport_memory(self) -> bool:
        """Whether the transport allocates the memory of the buckets, so that it can reduce them faster.

        Sharded buckets are laid out only once, so the transport allocates their memory from the start. The memory of
        other buckets is allocated by the transport only in `learn_order`.
        """
        can_use = self._transport.reduces_in_place and self.comm_hook is None
        return can_use and (self.order_is_learnt or self._options.sharded)

    def _build_anew(self, order: Sequence[int]) -> None:
        """Lay the buckets out again. If they had memory, free it, and give memory to the new buckets.

        Replace each `.grad` that was a view of a former bucket by a view of a new one.
        """
        viewing = {
            index
            for bucket in self._dense()
            for index, parameter, view in zip(
                bucket.plan.parameters, bucket.members, bucket.views, strict=True
            )
            if parameter.grad is view
        }
        had_memory = bool(self.buckets)
        self.free_memory()
        self._lay_out(order)
        if had_memory:
            self.make_buckets(viewing)

    def give_back_views(self) -> None:
        """Replace each `.grad` that is a view of a bucket by a copy in memory of its own."""
        for bucket in self._dense():
            bucket.give_back_views()

    def free_memory(self) -> None:
        """Free the memory of the buckets, so that the layout that follows can have it. Their plans stay known."""
        for bucket in self.buckets:  # the record of the last backward still refers to them
            bucket.free()
        self.buckets = []
        self.places.clear()

    def free_unused(self) -> None:
        """Free the memory of the buckets, because the strategy does not reduce the backwards of the next step.

        Usually a warm-up has ended, and no later backward is reduced. If one is, the buckets get memory again, and then
        they keep it. All ranks must make this call after the same step.
        """
        self.can_be_freed = False
        self.free_memory()

    def fits(self) -> bool:
        """Return whether gradients still have the dtype and the device that the buckets were made for.

        Only one parameter per bucket is checked for its device, because a module is moved as a whole.
        """
        # Every forward calls this, and a generator would cost more.
        for parameter, grad_dtype, device in self._kinds:
            if parameter.device != device or getattr(parameter, "grad_dtype", None) is not grad_dtype:
                return False
        return all(map(operator.is_, map(_dtype, self._parameters), self._dtypes))

    def _lay_out(self, order: Sequence[int]) -> None:
        """Plan the buckets for parameters in this order."""
        self.message = TailMessage(self._transport, self.form.numel) if self._tail_is_apart else None
        self.plans = self._planned(order)
        firsts = [self._parameters[plan.parameters[0]] for plan in self.plans]
        self._kinds = [(one, getattr(one, "grad_dtype", None), one.device) for one in firsts]
        self._dtypes = list(map(_dtype, self._parameters))
        kinds = {
            (spec.dtype, gradient_dtype(p)) for spec, p in zip(self._specs, self._parameters, strict=True)
        }
        self._converting = {name for name, dtype in kinds if str(dtype) != f"torch.{name}"}

    @property
    def _tail_is_apart(self) -> bool:
        """Whether a separate message carries the tail.

        There are four such cases: a communication hook's buffer must hold gradients only; beside sparse gradients the
        last dense bucket may be sent too early; the last bucket may be unused and not be sent; and each rank reads only
        its shard of a sharded bucket.
        """
        options = self._options
        return self.comm_hook is not None or bool(options.sparse) or options.skip_unused or options.sharded

    def _planned(self, order: Sequence[int]) -> tuple[BucketPlan, ...]:
        sharded = self._options.sharded
        num_shards = self._transport.team(self._parameters[0].device).size if sharded else 1
        return plan_buckets(
            self._specs,
            order,
            caps=self._options.caps,
            tail_numel=0 if self._tail_is_apart else self.form.numel,
            align_numel=ALIGNMENT_NUMEL if sharded else 1,
            multiple_of=num_shards * ALIGNMENT_NUMEL if sharded else 1,
        )

    def make_buckets(self, viewing: Collection[int] = ()) -> None:
        """Make the planned buckets with their memory. This is a collective call if the transport allocates the memory.

        Args:
            viewing: indices of the parameters whose `.grad` is a view of a former bucket. It becomes a view of a new
                one. The memory of a former bucket is freed as soon as no `.grad` is a view of it.
        """
        if self._options.sharded:
            self.buckets = self._make_sharded_buckets(self.plans)
        else:
            self.buckets = [self._make_bucket(plan, viewing) for plan in self.plans]
        for bucket in self.buckets:
            bucket.reduce_by(self.comm_hook, is_last=bucket is self.buckets[-1])
        places = {
            index: (bucket, bucket.views[at] if at < bucket.plan.num_large else None)
            for bucket in self.buckets
            for at, index in enumerate(bucket.plan.parameters)
        }
        self.places[:] = [places[index] for index in range(len(self._parameters))]

    def _make_bucket(self, plan: BucketPlan, viewing: Collection[int]) -> Bucket:
        if plan.sparse:
            return SparseBucket(plan, self._parameters, self._transport)
        # `.grad` cannot be a view of a bucket if the parameters' dtype is another one.
        has_views = self._options.as_bucket_view and plan.dtype not in self._converting
        flat = self._allocate(plan)
        bucket = DenseBucket(plan, self._parameters, self._transport, flat, as_view=has_views)
        for index, parameter, view in zip(plan.parameters, bucket.members, bucket.views, strict=True):
            if index in viewing:
                parameter.grad = view.copy_(parameter.grad)  # type: ignore[arg-type]
        return bucket

    def _allocate(self, plan: BucketPlan) -> Tensor:
        """Allocate the flat tensor of a bucket. This is a collective call if the transport allocates it."""
        numel = plan.numel + plan.padding_numel + plan.tail_numel
        dtype: torch.dtype = getattr(torch, plan.dtype)
        device = self._parameters[plan.parameters[0]].device
        if self._uses_transport_memory:
            return self._transport.allocate(numel, dtype, device)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _make_sharded_buckets(self, plans: Sequence[BucketPlan]) -> list[Bucket]:
        """Make the sharded buckets. If they need much memory in total, they use a pool of memory in turn.

        Buckets can share memory because a rank keeps only its own shard of a reduced bucket. A bucket in a pool is
        filled only when it is launched. Just before that, this rank waits for the bucket that used the memory last.
        """
        names = [spec.name for spec in self._specs]
        num_kinds = len({(plan.dtype, plan.device) for plan in plans})
        num_turns = max(_MIN_TURNS, POOL_BYTES // max(1, *(plan.payload_bytes for plan in plans)))
        uses_pool = num_kinds == 1 and len(plans) > num_turns
        pool: list[Tensor] = []
        if uses_pool:
            for turn in range(num_turns):
                largest = max(plans[turn::num_turns], key=lambda plan: plan.numel + plan.padding_numel)
                pool.append(self._allocate(largest))
        buckets: list[Bucket] = []
        for at, plan in enumerate(plans):
            if uses_pool:
                flat = self._transport.narrow(pool[at % num_turns], plan.numel + plan.padding_numel)
            else:
                flat = self._allocate(plan)
            buckets.append(
                ShardedBucket(
                    replace(plan, num_large=0) if uses_pool else plan,
                    self._parameters,
                    self._transport,
                    flat,
                    names=names,
                    outlives_memory=uses_pool,
                    predecessor=buckets[at - num_turns] if uses_pool and at >= num_turns else None,
                )
            )
        return buckets

    def shards(self) -> list[BucketShard]:
        """Return this rank's shard of each bucket, in order. The list is empty if gradients are not sharded."""
        return [bucket.shard for bucket in self.buckets if isinstance(bucket, ShardedBucket)]

    def stand_ins(self) -> list[Tensor | None]:
        """Return the stand-in of each parameter, which replaces `.grad` once the gradient is copied into its bucket.

        The stand-ins are None if gradients are not sharded.
        """
        found: list[Tensor | None] = [None] * len(self._parameters)
        for shard in self.shards():
            for index, stand_in in zip(shard.plan.parameters, shard.stand_ins, strict=True):
                found[index] = stand_in
        return found

    def _dense(self) -> list[DenseBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, DenseBucket)]


def _of_rank_0(numbers: Sequence[int], transport: Transport) -> list[int]:
    """Return the numbers of rank 0. A collective call, with equally many numbers on all ranks."""
    sent = torch.tensor(numbers, device=transport.control_device)
    transport.broadcast(sent, 0).wait()
    found: list[int] = sent.tolist()
    return found
