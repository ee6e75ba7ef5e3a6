"""Gradient synchronization: hooks fill buckets, buckets are reduced while backward goes on.

One backward, in order (`docs/architecture.md` has the picture):

1. the first gradient that is ready begins the backward: whether it synchronizes is decided here and now, and a
   callback for the end of this backward is queued in the autograd engine;
2. each ready gradient is counted, and copied into its bucket (large ones at once, small ones at launch);
3. a bucket whose gradients are all ready is launched, strictly in index order;
4. at the end of backward the remaining buckets are launched with zeros for what is missing, all are waited for,
   the control tail of the last one is read, and `.grad` gets the mean.

The number of Python calls is what this costs: one per parameter, a handful per bucket. Nothing here is done per
parameter that can be done per bucket.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Variable

from syncline.errors import SynclineError, UnreducedGradients
from syncline.plan.buckets import BucketCaps, ParameterSpec, plan_buckets
from syncline.sync.bucket import Bucket, copy_scaled
from syncline.sync.control import RankControl, decode, encode, tail_numel
from syncline.sync.ledger import Ledger
from syncline.sync.normalize import ItemNormalizer
from syncline.transport.base import Transport

__all__ = ["GradientOptions", "GradientSync", "parameter_specs"]

_NOT_IN_BACKWARD = -1
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """How gradients are synchronized; equal on all ranks."""

    caps: BucketCaps
    """How large buckets may grow."""
    as_bucket_view: bool
    """After the backward `.grad` is a view of the bucket, not a tensor of its own."""
    allow_unused: bool
    """A parameter without gradient counts as zero instead of being an error."""


def parameter_specs(named_parameters: Sequence[tuple[str, Tensor]]) -> list[ParameterSpec]:
    """What bucket planning needs to know of the parameters."""
    return [
        ParameterSpec(
            name=name,
            numel=parameter.numel(),
            itemsize_bytes=parameter.element_size(),
            dtype=str(parameter.dtype).removeprefix("torch."),
            device=str(parameter.device),
        )
        for name, parameter in named_parameters
    ]


class GradientSync:
    """Reduces the gradients of some parameters in each backward.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: what the buckets travel by.
        options: how.

    It stays active until `remove_hooks`. Not safe for two backwards of the same parameters at once.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.transport = transport
        self.options = options
        self.enabled = True
        """What `no_sync` switches off. Read when the first gradient of a backward is ready."""
        self.normalizer = ItemNormalizer(self.parameters, transport.size)
        self.ledger = Ledger(self.names)
        self.step = 0
        self.buckets: list[Bucket] = []
        self._specs = parameter_specs(named_parameters)
        self._order_is_learnt = False
        self._places: list[tuple[Bucket, Tensor | None]] = []
        # Rebuilt hooks would be slow, so the lists that hooks close over are only ever changed in place.
        self._ready: list[int] = []
        self._used_since_reduction: set[int] = set()
        self._task_id = _NOT_IN_BACKWARD
        self._synchronizing = False
        self._num_items: int | None = None
        self._scale = 1.0
        self._next_to_launch = 0
        self._step_under_way = 0
        self._began_at = 0.0
        self._broken: str | None = None
        if transport.size > 1:
            # Registration order reversed: what is used last in forward is usually ready first in backward.
            self._build(list(reversed(range(len(self.parameters)))))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def remove_hooks(self) -> None:
        """Leave the parameters as they were found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ layout

    def _build(self, order: Sequence[int]) -> None:
        num_tracked = len(self.parameters) if self.options.allow_unused else 0
        plans = plan_buckets(
            self._specs,
            order,
            caps=self.options.caps,
            tail_numel=tail_numel(self.transport.size, num_tracked),
        )
        self.buckets = [Bucket(plan, self.parameters) for plan in plans]
        places: dict[int, tuple[Bucket, Tensor | None]] = {}
        for bucket in self.buckets:
            for at, index in enumerate(bucket.plan.parameters):
                places[index] = (bucket, bucket.views[at] if at < bucket.num_large else None)
        self._places[:] = [places[index] for index in range(len(self.parameters))]

    def _learn_order(self) -> None:
        """Lay the buckets out anew in the order in which rank 0's gradients were ready.

        Once, at the end of the first synchronized backward; every rank gets rank 0's order, because buckets must
        be the same everywhere.
        """
        self._order_is_learnt = True
        if len(self.buckets) == 1:
            return
        seen = set(self._ready)
        rest = [i for bucket in self.buckets for i in bucket.plan.parameters if i not in seen]
        order = torch.tensor([*self._ready, *rest], device=self.transport.control_device)
        self.transport.broadcast(order, 0).wait()
        former_views = {id(view) for bucket in self.buckets for view in bucket.views}
        self._build(order.tolist())
        if self.options.as_bucket_view:
            for bucket in self.buckets:
                for parameter, view in zip(bucket.members, bucket.views, strict=True):
                    if id(parameter.grad) in former_views:
                        parameter.grad = view.copy_(parameter.grad)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ during backward

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        ready, places, task_id = self._ready, self._places, torch._C._current_graph_task_id
        as_view = self.options.as_bucket_view

        def gradient_is_ready(parameter: Tensor) -> None:
            if task_id() != self._task_id:
                self._begin()
            ready.append(index)
            if not self._synchronizing:
                return
            bucket, view = places[index]
            if view is not None:
                copy_scaled(view, parameter.grad, self._scale)  # type: ignore[arg-type]
                if as_view:
                    parameter.grad = view  # frees the gradient while its memory is still in cache
            bucket.num_pending -= 1
            if not bucket.num_pending:
                self._launch_complete()

        return gradient_is_ready

    def _begin(self) -> None:
        """The first gradient of a backward is ready."""
        if self._broken is not None:
            raise SynclineError(self._broken)
        if self._task_id != _NOT_IN_BACKWARD:
            self._abandon()
        if torch.is_grad_enabled():
            raise SynclineError(
                "backward(create_graph=True) through a synchronized module is not supported: the mean over ranks "
                "has no graph. Use torch.autograd.grad for the inner gradients"
            )
        self._task_id = torch._C._current_graph_task_id()
        self._began_at = time.perf_counter()
        self.normalizer.count.backward_begins()
        self._synchronizing = self.enabled and self.transport.size > 1
        if self.enabled:
            self._num_items = self.normalizer.count.take_for_reduction()
        if self._synchronizing:
            self._scale = 1.0 if self._num_items is not None else 1.0 / self.transport.size
            self._next_to_launch = 0
            self._step_under_way = self.transport.step = self.step + 1
            for bucket in self.buckets:
                bucket.reset()
        Variable._execution_engine.queue_callback(self._finish)

    def _abandon(self) -> None:
        """An earlier backward never came to its end: user code in it raised, or it is still going on."""
        num_launched = self._next_to_launch if self._synchronizing else 0
        self._forget_backward()
        if num_launched:
            self._broken = (
                f"rank {self.transport.rank}, step {self.step + 1}: a backward began before the previous one had "
                f"ended, when {num_launched} bucket(s) of it had been sent already, so the ranks are out of step. "
                "If an exception ended the previous backward, restart all ranks from a checkpoint; if this is "
                "activation checkpointing, use torch.utils.checkpoint(..., use_reentrant=False)"
            )
            raise SynclineError(self._broken)

    def _launch_complete(self) -> None:
        """Launch, in index order, every bucket that is complete."""
        while self._next_to_launch < len(self.buckets):
            if self.buckets[self._next_to_launch].num_pending:
                return
            self._launch_next(trigger=self._ready[-1], missing=_NONE)

    def _launch_next(self, *, trigger: int | None, missing: frozenset[int]) -> None:
        at = self._next_to_launch
        bucket = self.buckets[at]
        bucket.fill_small(self._scale, any_missing=bool(missing))
        if missing:
            bucket.fill_missing_large(missing, self._scale)
        tail = None
        if bucket.plan.tail_numel:
            tail = self._encode_tail(missing)
        self._next_to_launch = at + 1
        try:
            bucket.launch(self.transport, tail=tail, trigger=trigger)
        except SynclineError as error:
            self._with_place(error, bucket)
            raise

    def _encode_tail(self, missing: frozenset[int]) -> list[int]:
        used: list[int] = []
        if self.options.allow_unused:
            seen = self._used_since_reduction.union(self._ready)
            used = [int(index in seen) for index in range(len(self.parameters))]
        control = RankControl(
            gradients_missing=bool(missing) and not self.options.allow_unused, num_items=self._num_items
        )
        return encode(control, rank=self.transport.rank, num_ranks=self.transport.size, used=used)

    # ------------------------------------------------------------------ at the end of backward

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            if self._synchronizing:
                self._finish_synchronized()
            elif self.enabled:
                self._finish_alone()
            else:
                self._used_since_reduction.update(self._ready)
                self._record(divisor=1)
            self.normalizer.backward_is_done()
        finally:
            self._forget_backward()

    def _finish_alone(self) -> None:
        """A world of one rank: nothing to send, the same rules."""
        missing = self._missing()
        self.step += 1
        if missing and not self.options.allow_unused:
            raise self._unreduced({0: tuple(self.names[i] for i in sorted(missing))})
        divisor = 1
        if self._num_items is not None:
            divisor = self.normalizer.total([self._num_items], step=self.step)
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], float(divisor))
        self._used_since_reduction.clear()
        self._record(divisor=divisor)

    def _finish_synchronized(self) -> None:
        missing = self._missing()
        while self._next_to_launch < len(self.buckets):
            self._launch_next(trigger=None, missing=missing)
        self.step += 1
        if self._num_items is None and not self.options.allow_unused and not missing:
            # The common case: hand out each bucket while later ones are still on their way.
            for bucket in self.buckets:
                self._wait(bucket)
                self._hand_out(bucket, _NONE, any_missing=False)
            self._check(*self._decode())
            divisor = self.transport.size
        else:
            for bucket in self.buckets:
                self._wait(bucket)
            ranks, used = self._decode()
            self._check(ranks, used)
            divisor = self.transport.size
            if self._num_items is not None:
                divisor = self.normalizer.total([control.num_items or 0 for control in ranks], step=self.step)
                for bucket in self.buckets:
                    bucket.divide(divisor)
            skip = frozenset(i for i, any_rank in enumerate(used) if not any_rank) if missing else _NONE
            for bucket in self.buckets:
                self._hand_out(bucket, skip, any_missing=bool(missing))
        self._used_since_reduction.clear()
        self._record(divisor=divisor)
        if not self._order_is_learnt:
            self._learn_order()

    def _missing(self) -> frozenset[int]:
        """The parameters without a gradient in this backward."""
        seen = set(self._ready)
        if len(seen) != len(self._ready):
            twice = sorted({self.names[i] for i in seen if self._ready.count(i) > 1})
            self._broken = (
                f"rank {self.transport.rank}, step {self.step + 1}: {', '.join(twice)} received a gradient more than "
                "once in one backward, the second time after it may have been sent. With activation checkpointing "
                "use torch.utils.checkpoint(..., use_reentrant=False)"
            )
            raise SynclineError(self._broken)
        if len(seen) == len(self.parameters):
            return _NONE
        return frozenset(range(len(self.parameters))) - seen

    def _wait(self, bucket: Bucket) -> None:
        try:
            bucket.wait()
        except SynclineError as error:
            self._with_place(error, bucket)
            raise

    def _with_place(self, error: SynclineError, bucket: Bucket) -> None:
        """Say in the transport's error which step, phase and parameters it hit; from now on the module is broken.

        The same exception goes on, so that a user sees one traceback.
        """
        names = [self.names[i] for i in bucket.plan.parameters]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} parameters)" if len(names) > 3 else "")
        rank, step = self.transport.rank, self._step_under_way
        place = f"rank {rank}, step {step}, backward, bucket {bucket.plan.index} ({shown})"
        self._broken = f"{place}: {error}"
        error.args = (self._broken,)

    def _hand_out(self, bucket: Bucket, skip: frozenset[int], *, any_missing: bool) -> None:
        if self.options.as_bucket_view:
            bucket.hand_over_views(skip)
        else:
            bucket.copy_out(skip, any_missing=any_missing)

    def _decode(self) -> tuple[tuple[RankControl, ...], tuple[bool, ...]]:
        return decode(self.buckets[-1].read_tail(), num_ranks=self.transport.size)

    def _check(self, ranks: Sequence[RankControl], used: Sequence[bool]) -> None:
        """Raise, on every rank alike, what any rank reported."""
        if any(control.gradients_missing for control in ranks):
            mine = json.dumps(sorted(self._missing())).encode()
            everyone = [json.loads(row) for row in self.transport.all_gather_bytes(mine)]
            raise self._unreduced(
                {rank: tuple(self.names[i] for i in row) for rank, row in enumerate(everyone) if row}
            )
        counted = [rank for rank, control in enumerate(ranks) if control.num_items is not None]
        if counted and len(counted) != len(ranks):
            others = sorted(set(range(len(ranks))) - set(counted))
            raise SynclineError(
                f"step {self.step}: rank(s) {_listed(counted)} ran this backward under normalize_by, rank(s) "
                f"{_listed(others)} did not: the gradients have no common divisor. Use normalize_by on all ranks "
                "(0 items is fine) or on none, then zero the gradients"
            )

    def _unreduced(self, missing: dict[int, tuple[str, ...]]) -> UnreducedGradients:
        return UnreducedGradients(
            missing, step=self.step, num_parameters=len(self.parameters), num_ranks=self.transport.size
        )

    # ------------------------------------------------------------------ between backwards

    def _forget_backward(self) -> None:
        self._ready.clear()
        self._task_id = _NOT_IN_BACKWARD
        self._synchronizing = False
        self._num_items = None

    def _record(self, *, divisor: int) -> None:
        self.ledger.note(
            step=self.step,
            ready=self._ready.copy(),
            began_at=self._began_at,
            divisor=divisor,
            counted_items=self._num_items is not None,
            buckets=self.buckets if self._synchronizing else (),
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
