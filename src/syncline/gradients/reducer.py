"""Gradient synchronization: hooks fill buckets, and buckets are reduced while backward is running.

One backward, in order (`docs/architecture.md` has the picture):

1. The first gradient that is ready begins the backward. This decides if the backward synchronizes, and a callback for
   its end is queued in the autograd engine.
2. Each ready gradient is counted and copied into its bucket (large ones at once, small ones at launch).
3. A bucket whose gradients are all ready is launched, strictly in index order.
4. At the end of backward the remaining buckets are launched, with zeros for missing gradients. All buckets are waited
   for, the control tail of the last one is read, and `.grad` gets the mean.

The cost is the number of Python calls: one per parameter, a few per bucket. So work is done per bucket wherever it need
not be done per parameter.

A registry of all gradient synchronizations stands at the end of the file. It finds the one of a bare module by the
module's parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncline._torch.autograd import current_graph_task_id, is_inside_another_backward, queue_callback
from syncline._torch.tensors import foreach_div_
from syncline.errors import SynclineError
from syncline.gradients.backward_owner import Ownership
from syncline.gradients.bucket import Bucket, copy_scaled
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.distributed_autograd import AutogradContexts
from syncline.gradients.graph_tasks import Entry, Turns
from syncline.gradients.layout import BucketLayout
from syncline.gradients.ledger import Ledger
from syncline.gradients.options import GradientOptions
from syncline.gradients.out_of_step import Trouble
from syncline.gradients.riders.base import Reduced, Rider, Riders
from syncline.gradients.riders.forwards import Forwards
from syncline.gradients.riders.items import ItemNormalizer, Items
from syncline.gradients.riders.metrics import Metrics
from syncline.gradients.riders.missing import MissingGradients, StaticGraph
from syncline.gradients.riders.nonfinite import NonFinite, NonFiniteWatch
from syncline.gradients.riders.replicas import Replicas
from syncline.gradients.riders.same_data import SameData
from syncline.gradients.riders.settings import Settings
from syncline.gradients.riders.stop import Stop
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.usage import GraphUsage, SharedUsage, StaticUsage, is_accumulating
from syncline.session.registry import REGISTRY
from syncline.transport.base import Transport
from syncline.user_code import warn_user

__all__ = ["GradientSync", "reducers_of"]


_NONE: frozenset[int] = frozenset()


class GradientSync:
    """The reducer of some parameters' gradients, active in each backward.

    It stays active until `remove_hooks`. It is not safe for two backwards of the same parameters at once.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
        has_own_connection: whether `transport` is used for nothing else, not even for collectives that a communication
            hook starts.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
        *,
        has_own_connection: bool = False,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.transport = transport
        self.main_lane = transport
        """The transport on which ranks agree if gradients are reduced outside of a backward."""
        self.options = options
        self.enabled = True
        """Whether backwards synchronize; False under `no_sync`. Read when the first gradient of a backward is ready."""
        self.normalizer = ItemNormalizer(self.parameters, transport.size)
        self.ledger = Ledger(self.names)
        self.layout = BucketLayout(named_parameters, transport, options)
        self._static = StaticUsage(len(self.parameters)) if options.static_graph else None
        self.stop = Stop()
        self.forwards = Forwards()
        self.settings = Settings()
        self.metrics = Metrics()
        self.nonfinite = NonFinite()
        if options.on_nonfinite != "ignore":
            gradients = partial(_gradients_of, self.parameters, self.layout)
            self.nonfinite = NonFiniteWatch(options.on_nonfinite, self.names, gradients, transport)
        self.replicas = Replicas()
        self._same_data = SameData()
        self._items = Items()
        self._missing_gradients = MissingGradients(self.names)
        self._static_graph = None if self._static is None else StaticGraph(self.names, self._static)
        self._make_riders()
        self.step = 0
        """Number of steps of the run so far, as used in messages and records; includes steps before a resume."""
        self._steps_before = 0
        self.comm_hook: CommHook | None = None
        self._has_own_connection = has_own_connection
        self.num_contributing: int | None = None
        """Number of ranks whose gradients count in the next backward; None for all ranks (see `join`)."""
        self.num_ranks_using: Sequence[int] = ()
        """Number of ranks that used each parameter in the last backward; empty if unused ones are not detected."""
        self.decide: Callable[[], bool] | None = None
        """Called when a backward begins; returns whether it is reduced. None: each backward is."""
        self.before_reduction: Callable[[], None] | None = None
        """Called when a backward that synchronizes begins, to compare what ranks must agree on before the first one.
        If it raises, the next backward calls it again; once it has returned, it is not called any more."""
        self.on_reduced: Callable[[], None] | None = None
        """Called inside of backward when `.grad` holds the reduced gradients."""
        self.pending_futures: list[torch.futures.Future[Any]] = []
        """Further futures that the end of the next backward waits for (those of a buffer hook, for example)."""
        self._usage = (
            GraphUsage(self.parameters) if options.allow_unused and not options.static_graph else None
        )
        self._shared = SharedUsage(transport, len(self.parameters)) if options.skip_unused else None
        self._turns = Turns()
        self.ownership = Ownership(self.parameters)
        """Tells backwards of this wrapper apart from those of another wrapper with some of the same parameters."""
        self._context_id: int | None = None
        """The distributed autograd context of the present backward; None for an ordinary one."""
        # Rebuilding hooks would be slow, so the lists that hooks close over are only changed in place.
        self._ready: list[int] = []
        self._used_since_reduction: set[int] = set()
        self._synchronizing = False
        self._is_deferred = False
        """Whether the present backward is reduced at its end, because hooks must not copy under create_graph=True."""
        self._has_warned_of_graph = False
        self._absent = _NONE
        self._missing_at_end: frozenset[int] | None = None
        self._scale = 1.0
        self._next_to_launch = 0
        self._sent: list[Bucket | SparseBucket] = []
        self._step_under_way = 0
        self._began_at = 0.0
        self.trouble = Trouble(transport.rank, self.names)
        if self._sends:
            self.layout.build(None)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._contexts = AutogradContexts.of_this_process(self.parameters, self._context_gradient_is_ready)
        if self._contexts is not None:
            self.handles += self._contexts.handles
        rivals = reducers_of(self.parameters)
        self.ownership.share_with(other.ownership for other in rivals)
        for other in rivals:
            other.layout.give_back_views()
        REGISTRY.add(self)

    def _make_riders(self) -> None:
        """Put the riders in order; the same on all ranks."""
        riders: list[Rider] = [
            self.stop,
            self._same_data,
            self.forwards,
            self.settings,
            self._missing_gradients,
        ]
        if self._static_graph is not None:
            riders.append(self._static_graph)
        riders += [self._items, self.metrics]
        if self.options.on_nonfinite != "ignore":
            riders.append(self.nonfinite)
        if self.options.compares_replicas:
            riders.append(self.replicas)
        self._riders = Riders(riders, self.transport)
        self.layout.reserve_tail(self._riders.widths)

    def use_metrics(self, names: Sequence[str]) -> None:
        """Report these metrics from now on; the same on all ranks, between two backwards."""
        self.metrics.use_names(names)
        self._make_riders()

    def continues(self, former: GradientSync) -> None:
        """Take over the state of a former object, whose parameters or transport have changed, and remove its hooks."""
        former.remove_hooks()
        self.step, self._steps_before = former.step, former._steps_before
        self.enabled = former.enabled
        self.num_contributing = former.num_contributing
        self.stop, self.forwards, self.settings = former.stop, former.forwards, former.settings
        self.metrics = former.metrics
        self._same_data = former._same_data
        self.nonfinite.continues(former.nonfinite)
        self._make_riders()
        self.on_reduced = former.on_reduced
        self.decide = former.decide
        self.trouble.text = former.trouble.text
        self.pending_futures = former.pending_futures
        self.ownership.continues(former.ownership)
        # A block of normalize_by, or backwards under no_sync, may have begun before the module changed.
        self.normalizer = former.normalizer
        self.normalizer.follow(self.parameters, self.transport.size)
        used = {id(former.parameters[index]) for index in former._used_since_reduction}
        self._used_since_reduction.update(i for i, p in enumerate(self.parameters) if id(p) in used)
        if self.replicas.watch is not None and former.replicas.watch is not None:
            self.replicas.watch.continues(former.replicas.watch)
        if former.comm_hook is not None:
            self.comm_hook = former.comm_hook
            self.layout.build(former.comm_hook)

    @property
    def _sends(self) -> bool:
        return self.transport.size > 1 or self.comm_hook is not None

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._turns.is_running

    @property
    def has_unreduced(self) -> bool:
        """Whether `.grad` holds gradients that were not reduced, because the last backwards ran under `no_sync`."""
        return bool(self._used_since_reduction) and self._sends

    def reduced_outside(self, indices: Collection[int], *, num_items: int | None, was_changed: bool) -> None:
        """Record that `.grad` of these parameters was reduced outside of a backward.

        Args:
            indices: indices of the parameters; all of them if items are counted.
            num_items: the number of items that the sum was divided by; None if it was divided by the number of ranks.
            was_changed: whether a mean left by an earlier reduction was changed before this one, see `Standing`.
        """
        self._used_since_reduction.difference_update(indices)
        if not self._used_since_reduction:
            self.normalizer.was_reduced_outside(is_known=num_items is not None or not was_changed)
        divisor = self.transport.size if num_items is None else num_items
        self.nonfinite.conclude_outside([(i, self.parameters[i].grad) for i in indices], step=self.step)
        self.ledger.note_reduction(
            divisor=divisor, counted_items=num_items is not None, nonfinite=self.nonfinite.last
        )
        self.nonfinite.act()

    def discards_step(self) -> bool:
        """Return whether attached optimizers must skip their step, because `.grad` is not finite."""
        if self._used_since_reduction and not self._sends and self.nonfinite.last is not None:
            # In a world of one rank, gradients of backwards under no_sync may be applied without any reduction.
            self._used_since_reduction.clear()
            self._conclude_alone()
            self.ledger.note_judgement(self.nonfinite.last)
            self.nonfinite.act()
        return self.nonfinite.discards_step()

    def _conclude_alone(self) -> None:
        """Check all of `.grad` for values that are not finite, because there is one rank."""
        self.nonfinite.conclude_alone([(i, p.grad) for i, p in enumerate(self.parameters)], step=self.step)

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.ownership.withdraw()

    def use_comm_hook(self, hook: CommHook) -> None:
        """Reduce buckets by `hook` from now on. The hook gets undivided gradients, and has to divide them.

        Raises:
            RuntimeError: there is a hook already, or a backward has begun and not ended.
            ValueError: the hook does its own division and is registered inside of `normalize_by`.
        """
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: "
                f"{self.comm_hook.name} is registered"
            )
        if self._turns.is_running:
            raise RuntimeError(
                "register_comm_hook must be called between two backwards, got it in the backward of step "
                f"{self.step + 1}"
            )
        if self.normalizer.count.is_open and not hook.averages:
            raise ValueError(
                f"normalize_by cannot divide what communication hook {hook.name} reduces: the hook divides by itself. "
                "Leave the block of normalize_by before the hook is registered, and use one or the other"
            )
        self.comm_hook = hook
        self.layout.build(hook)

    @property
    def num_backwards(self) -> int:
        """Number of synchronized backwards so far, of this object and of those whose state it took over."""
        return self.step - self._steps_before

    def resume_from_step(self, step: int) -> None:
        """Continue to count from a step, because parameters that were saved after it have been loaded.

        Only messages and records may depend on this number. One rank may load alone and broadcast the loaded values, so
        ranks may differ in it.
        """
        self.step, self._steps_before = step, step - self.num_backwards
        if (watch := self.replicas.watch) is not None:
            watch.steps_before = self._steps_before
            watch.agreed_at(None)

    def mark_replicas_equal(self) -> None:
        """Record that all ranks have just compared their replicas, which were equal."""
        if self.replicas.watch is not None:
            self.replicas.watch.agreed_at(self.num_backwards)

    # ------------------------------------------------------------------ during backward

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        if self._static is not None:
            return self._make_static_hook(index, self._static)
        ready, places, turns = self._ready, self.layout.places, self._turns
        current_task = current_graph_task_id
        as_view = self.options.as_bucket_view and self.options.reduce_dtype is None
        has_unused, rivals = self._usage is not None, self.ownership.rivals
        stand_in = self.layout.stand_in_of(index)

        def gradient_is_ready(parameter: Tensor) -> None:
            if current_task() != turns.current and not self._begin():
                return
            ready.append(index)
            if not self._synchronizing:
                return
            if has_unused and index in self._absent:
                raise self.trouble.from_outside(self._step_under_way, index)
            bucket, view = places[index]
            if view is not None:
                copy_scaled(view, parameter.grad, self._scale)
                if as_view and not has_unused and not rivals:
                    parameter.grad = view  # frees the gradient while its memory is still in cache
                elif stand_in is not None:
                    parameter.grad = stand_in
            bucket.num_pending -= 1
            if not bucket.num_pending:
                self._launch_complete()

        return gradient_is_ready

    def _make_static_hook(self, index: int, static: StaticUsage) -> Callable[[Tensor], None]:
        """Return a hook for a static graph, in which a parameter may get several gradients in one backward."""
        ready, places, turns = self._ready, self.layout.places, self._turns
        counts, expected = static.counts, static.expected
        current_task = current_graph_task_id

        def gradient_is_ready(parameter: Tensor) -> None:
            if current_task() != turns.current and not self._begin():
                return
            counts[index] += 1
            if counts[index] != expected[index]:
                return
            ready.append(index)
            if not self._synchronizing or not static.is_learnt:
                return
            bucket, view = places[index]
            if view is not None:
                copy_scaled(view, parameter.grad, self._scale)
            bucket.num_pending -= 1
            if not bucket.num_pending:
                self._launch_complete()

        return gradient_is_ready

    def _context_gradient_is_ready(self, index: int, context_id: int) -> None:
        """Mark a gradient of distributed autograd as ready.

        An ordinary backward runs this hook, too. It is ignored then, because the ordinary hook has marked the gradient.
        """
        if self._turns.is_running and self._context_id is None:
            return
        if current_graph_task_id() != self._turns.current:
            self._context_id = context_id
            if not self._begin():
                return
        self._ready.append(index)

    def _mark_ready(self, index: int) -> None:
        """Put a ready gradient into its bucket, as a hook does, if its hook could not do so."""
        bucket, view = self.layout.places[index]
        if view is not None:
            copy_scaled(view, self.parameters[index].grad, self._scale)
        bucket.num_pending -= 1
        if not bucket.num_pending:
            self._launch_complete()

    def forward_begins(self) -> None:
        """Note that a forward begins, so that the next backward starts a new step."""
        self._turns.forward_begins()
        if self._contexts is not None:
            self._contexts.forward_begins()

    def outermost_hook(self) -> Callable[[object], None]:
        """Return a hook for a forward's outputs; a graph task that reaches one is not inside of another task."""
        turns, current_task = self._turns, current_graph_task_id

        def backward_begins(_: object) -> None:
            if current_task() != turns.outermost and self.handles:  # no handles: the hooks were removed
                turns.outermost = current_task()
                if is_accumulating(self.parameters):
                    self._begin()

        return backward_begins

    def _begin(self) -> bool:
        """Register a graph task: it begins a new backward, or continues one in an inner or outer task.

        Returns:
            Whether it is a backward of this wrapper.
        """
        task = current_graph_task_id()
        if self.ownership.rivals and not self._turns.knows(task) and not self.ownership.owns(task):
            return False
        if self.trouble.text is not None:
            self.trouble.raise_again()
        entry = self._turns.enter(task)
        if entry is Entry.GOES_ON:
            if not self._turns.knows(task):
                self._join_task(task)
            return True
        if entry is Entry.INTERRUPTS:
            self._abandon()
        elif entry is Entry.TOO_LATE:
            raise self.trouble.too_late(self.step)
        if self.before_reduction is not None and self.enabled:
            self.before_reduction()
            self.before_reduction = None  # only now: if it raised, the next backward calls it again
        self._began_at = time.perf_counter()
        self.nonfinite.backward_begins(has_hook=self.comm_hook is not None)
        self.normalizer.count.backward_begins()
        synchronizes = self.enabled and self._sends and (self.decide is None or self.decide())
        self._is_deferred = synchronizes and torch.is_grad_enabled()
        self._synchronizing = synchronizes and not self._is_deferred
        if self._is_deferred:
            self._check_graph()
        if self.enabled:
            self._items.num_items = self.normalizer.count.take_for_reduction()
        if self._static is not None:
            self._static.reset()
        if synchronizes:
            if self._items.num_items is not None or self.comm_hook is not None:
                self._scale = 1.0
            else:
                self._scale = 1.0 / (self.num_contributing or self.transport.size)
            self._start_step()
            if self._usage is not None and self._context_id is None and not is_inside_another_backward():
                self._mark_absent(self._usage.absent())
            if self._shared is not None:
                self._shared.tell(self._uses(set(range(len(self.parameters))) - self._absent))
        self._join_task(task)
        return True

    def _check_graph(self) -> None:
        """Raise or warn, because the backward runs under create_graph=True and only values are reduced.

        Raises:
            SynclineError: gradients are sharded.
        """
        if self.options.sharded:
            raise SynclineError(
                f"rank {self.transport.rank}, step {self.step + 1}: backward(create_graph=True) is not possible with "
                "sharded=True, where reduced gradients lie in shards without a graph. Use torch.autograd.grad for the "
                "inner gradients, or wrap the module without sharded=True"
            )
        if self.transport.rank or self._has_warned_of_graph:
            return
        self._has_warned_of_graph = True
        warn_user(
            f"step {self.step + 1}: backward(create_graph=True): the values of .grad are the mean over ranks, but its "
            "graph is this rank's own, so second derivatives are not averaged. Average what is computed from them "
            "(sl.average_), or take an inner gradient by torch.autograd.grad(..., create_graph=True) and run a plain "
            "backward() on the loss, which is averaged. This warning comes once"
        )

    def _uses(self, now: set[int]) -> list[int]:
        """Return 1 for each parameter that this rank will have a gradient for, from `now` or from no_sync, else 0."""
        seen = self._used_since_reduction
        return [
            int(index in now or (index in seen and parameter.grad is not None))
            for index, parameter in enumerate(self.parameters)
        ]

    def _start_step(self) -> None:
        self._next_to_launch = 0
        self._sent = []
        self._step_under_way = self.transport.board.step = self.step + 1
        self.transport.board.phase = "backward"
        for bucket in self.layout.buckets:
            bucket.reset()
        self._riders.begin_step(self._step_under_way)

    def _mark_absent(self, absent: frozenset[int]) -> None:
        """Mark parameters that this backward will not reach, so that their buckets do not wait for them."""
        self._absent = absent
        for index in absent:
            self.layout.places[index][0].num_pending -= 1

    def _join_task(self, task: int) -> None:
        self._turns.join(task)
        queue_callback(partial(self._end_of_task, task))

    def _abandon(self) -> None:
        """Abandon an earlier backward that has not ended, because user code in it raised or because it still runs.

        Raises:
            SynclineError: that backward had sent data, so the ranks are out of step.
        """
        num_launched = self._next_to_launch if self._synchronizing else 0
        is_under_way = self._synchronizing or self._is_deferred
        are_out_of_step = num_launched or (is_under_way and self._shared is not None)
        self._forget_backward()
        if are_out_of_step:
            raise self.trouble.interrupted(self.step + 1, num_launched)

    def _launch_complete(self) -> None:
        """Launch, in index order, every bucket that is complete."""
        buckets = self.layout.buckets
        while self._next_to_launch < len(buckets):
            bucket = buckets[self._next_to_launch]
            if bucket.num_pending or (self._static is not None and bucket.plan.tail_numel):
                return  # the last bucket reports if a static graph has changed, which is known only at the end
            missing = self._absent.intersection(bucket.plan.parameters) if self._absent else _NONE
            self._launch_next(trigger=self._ready[-1], missing=missing)

    def _launch_next(self, *, trigger: int | None, missing: frozenset[int]) -> None:
        at = self._next_to_launch
        bucket = self.layout.buckets[at]
        self._next_to_launch = at + 1
        try:
            if self._shared is not None and self._shared.is_unused_by_all(bucket.plan.parameters):
                return
            bucket.fill(self._scale, missing)
            self._riders.look_at(bucket)
            tail = self._encode_tail(missing) if bucket.plan.tail_numel else None
            bucket.send(tail=tail, trigger=trigger)
        except Exception as error:
            self.trouble.add_place(error, self._step_under_way, bucket.plan)
            raise
        self._sent.append(bucket)

    def _encode_tail(self, missing: frozenset[int]) -> list[int]:
        used: list[int] = []
        if self.options.allow_unused:
            seen = self._used_since_reduction.union(self._ready)
            if len(seen) == len(self.parameters):
                used = [int(parameter.grad is not None) for parameter in self.parameters]
            else:
                used = [int(index in seen and p.grad is not None) for index, p in enumerate(self.parameters)]
        self._missing_gradients.indices = _NONE if self.options.allow_unused else missing
        words = self._riders.words()
        if not used and not any(words):
            return []  # nothing to report, as in almost every step
        return self.layout.form.encode(words, rank=self.transport.rank, used=used)

    # ------------------------------------------------------------------ at the end of backward

    @torch.no_grad()
    def _end_of_task(self, task: int, *, is_copied: bool = False) -> None:
        """Finish the backward if it has ended with this graph task; it has not if an outer task continues it."""
        if not is_copied:
            if not self._turns.ends_backward(task, is_complete=len(self._ready) >= len(self.parameters)):
                return
            self._synchronizing = self._synchronizing or self._is_deferred
        try:
            if self.ownership.rivals and not is_copied and self._synchronizing and self._context_id is None:
                # The backward may be another wrapper's, too. So each copies its gradients before any changes `.grad`.
                self._launch_rest()
                queue_callback(partial(self._end_of_task, task, is_copied=True))
                return
            if self._context_id is not None and self._synchronizing:
                self._finish_in_context(self._context_id)
            elif self._synchronizing:
                self._finish_synchronized()
            elif self.enabled:
                self._finish_alone()
            else:
                self._used_since_reduction.update(self._ready)
                self._record(divisor=1, metrics={})
            self.normalizer.backward_is_done()
            self.nonfinite.act()
        except BaseException:
            self.nonfinite.failed()
            self._forget_backward()
            raise
        self._forget_backward()
        for future in self.pending_futures:
            future.wait()
        self.pending_futures.clear()
        if self.on_reduced is not None and self.enabled:
            self.on_reduced()

    def _finish_alone(self) -> None:
        """Finish a backward of a world of one rank, or one that stays local, by the same rules but without sending."""
        missing = self._missing()
        self.step += 1
        self._missing_gradients.indices = _NONE if self.options.allow_unused else missing
        self._missing_gradients.check_alone(
            rank=self.transport.rank, num_ranks=self.transport.size, step=self.step
        )
        if self._static_graph is not None:
            self._static_graph.check_alone(
                rank=self.transport.rank, num_ranks=self.transport.size, step=self.step
            )
        divisor = 1
        if self._items.num_items is not None:
            divisor = self.normalizer.total([self._items.num_items], step=self.step)
            foreach_div_([p.grad for p in self.parameters if p.grad is not None], float(divisor))
        if self._static is not None:
            self._static.learn()
        if self.transport.size == 1:
            self._conclude_alone()
        self._used_since_reduction.clear()
        self.metrics.conclude_alone()
        self._record(divisor=divisor)

    def _finish_in_context(self, context_id: int) -> None:
        """Finish a backward of distributed autograd, whose gradients are not in buckets yet."""
        assert self._contexts is not None
        if self.options.sharded:
            raise SynclineError(
                "distributed autograd keeps gradients in contexts of its own, which sharded=True has no shards of: "
                "wrap the module without sharded=True"
            )
        with self._contexts.as_grad(context_id):
            for index in tuple(self._ready):
                self._mark_ready(index)
            self._finish_synchronized()

    def _launch_rest(self) -> frozenset[int]:
        """Launch the remaining buckets, with zeros for missing gradients; return the indices of the missing ones."""
        if self._missing_at_end is not None:
            return self._missing_at_end
        is_learning = self._static is not None and not self._static.is_learnt
        if self._static is not None:
            self._static.learn()
        if is_learning or self._is_deferred:
            for index in tuple(self._ready):
                self._mark_ready(index)
        missing = self._missing_at_end = self._missing()
        while self._next_to_launch < len(self.layout.buckets):
            self._launch_next(trigger=None, missing=missing)
        return missing

    def _finish_synchronized(self) -> None:
        missing = self._launch_rest()
        # With views, one wrapper could scale in place a gradient that another wrapper has not copied yet.
        keeps_tensors = self._is_deferred or bool(self.ownership.rivals)
        self._launch_message(lambda: self._encode_tail(missing), are_reduced=False)
        self.step += 1
        divisor = self.num_contributing or self.transport.size
        if self._items.num_items is None and not self.options.allow_unused and not missing:
            # The common case: hand out each bucket while later ones are still being reduced.
            left = 1.0 if self.comm_hook is None else self._left_to_divide(divisor)
            for bucket in self._sent:
                self._wait(bucket)
                if left != 1:
                    bucket.divide(left)
                bucket.hand_out(_NONE, any_missing=False, keeps_tensor=keeps_tensors)
            self._launch_message(lambda: self._encode_tail(_NONE), are_reduced=True)
            self._hear()
        else:
            for bucket in self._sent:
                self._wait(bucket)
            if self._shared is not None:
                self._shared.wait()
            self._launch_message(lambda: self._encode_tail(missing), are_reduced=True)
            self._hear()
            if self._items.num_items is not None:
                divisor = self.normalizer.total(self._items.of_ranks, step=self.step)
            left = self._left_to_divide(divisor)
            if left != 1:
                for bucket in self._sent:
                    bucket.divide(left)
            used = self.num_ranks_using
            skip = frozenset(i for i, num_ranks in enumerate(used) if not num_ranks) if missing else _NONE
            for bucket in self._sent:
                bucket.hand_out(skip, any_missing=bool(missing), keeps_tensor=keeps_tensors)
        self._conclude(self._sent)
        self._used_since_reduction.clear()
        self._record(divisor=divisor)
        if not self.layout.order_is_learnt:
            self.layout.learn_order(self._ready)

    def _left_to_divide(self, divisor: int) -> float:
        """Return the divisor that is still to be applied to the result of the reduction.

        A user's hook has already divided. A hook that encodes gradients has averaged over all ranks.
        """
        if self.comm_hook is not None and self.comm_hook.averages:
            return divisor / self.transport.size
        return 1.0 if self._items.num_items is None else divisor

    def _launch_message(self, tail: Callable[[], list[int]], *, are_reduced: bool) -> None:
        """Send the tail if no bucket carries it, either before or after the buckets are waited for.

        Sending it before lets everything travel at once. It is sent after if it shares a connection with a
        communication hook: the hook may start its own collectives whenever one of its futures completes, and the
        tail's collective would get between them.

        Args:
            tail: returns the tail to send.
            are_reduced: whether this call comes after the buckets were waited for.
        """
        message = self.layout.message
        must_be_last = self.comm_hook is not None and not self._has_own_connection
        if message is not None and are_reduced == must_be_last:
            message.launch(tail())

    def shadow(self) -> None:
        """Take part in a synchronized backward of the other ranks with zeros, because this rank has no inputs left."""
        self._synchronizing = True
        self._start_step()
        self.nonfinite.backward_begins(has_hook=self.comm_hook is not None)
        tail = self.layout.form.encode(
            None,
            rank=self.transport.rank,
            used=[0] * len(self.parameters) if self.options.allow_unused else (),
        )
        try:
            if self._shared is not None:
                self._shared.tell([0] * len(self.parameters))
            for bucket in self.layout.buckets:
                if self._shared is not None and self._shared.is_unused_by_all(bucket.plan.parameters):
                    continue
                bucket.launch_zeros(tail=tail if bucket.plan.tail_numel else None)
                self._sent.append(bucket)
            self.step += 1
            self._launch_message(lambda: tail, are_reduced=False)
            for bucket in self._sent:
                self._wait(bucket)
            self._launch_message(lambda: tail, are_reduced=True)
            self._hear()
            self._conclude(())
            if not self.layout.order_is_learnt:
                self.layout.learn_order(())
            self.nonfinite.act()
        finally:
            self._forget_backward()

    def _missing(self) -> frozenset[int]:
        """Return the indices of the parameters without a gradient in this backward."""
        seen = set(self._ready)
        if len(seen) != len(self._ready):
            twice = [index for index in seen if self._ready.count(index) > 1]
            raise self.trouble.twice(self.step + 1, twice)
        if self.options.allow_unused:  # the hook of an undefined gradient is called, but there is no value
            seen = {index for index in seen if self.parameters[index].grad is not None}
        if len(seen) == len(self.parameters):
            return _NONE
        return frozenset(range(len(self.parameters))) - seen

    def _wait(self, bucket: Bucket | SparseBucket) -> None:
        self.transport.board.bucket = bucket.plan.index
        try:
            bucket.wait()
        except Exception as error:
            self.trouble.add_place(error, self._step_under_way, bucket.plan)
            raise

    def _hear(self) -> None:
        """Read the tail, and give the riders the words of all ranks. If a rider raises, it raises on every rank."""
        if self.layout.message is not None:
            tail = self.layout.message.read()
        else:
            last = self.layout.buckets[-1]
            assert isinstance(last, Bucket)
            tail = last.read_tail()
        rows: Sequence[Sequence[int] | None] = ()
        if any(tail) or self.options.allow_unused:
            rows, self.num_ranks_using = self.layout.form.decode(tail)
        self._riders.hear(rows, self.step)

    def _conclude(self, buckets: Sequence[Bucket | SparseBucket]) -> None:
        """Let the riders act on the result in `.grad`. If a rider raises, it raises on every rank."""
        averages = self.comm_hook is None or self.comm_hook.averages
        self._riders.conclude(
            Reduced(
                step=self.step,
                buckets=buckets,
                # A mean of gradients scaled by 1/N overflows only if a rank's own gradient does. A sum, or the result
                # of a hook, may overflow without that.
                can_overflow=self.comm_hook is not None or self._items.any_counted,
                is_mean=averages and not self.options.sharded,
                any_nonfinite=self.nonfinite.was_reported,
            )
        )

    # ------------------------------------------------------------------ between backwards

    def _forget_backward(self) -> None:
        if self._synchronizing:
            self._riders.forget()
            board = self.transport.board
            board.phase, board.bucket = "after backward", None
        self._turns.forget()
        self._context_id = None
        self._ready.clear()
        self._absent = _NONE
        self._missing_at_end = None
        self.num_contributing = None
        self._synchronizing = self._is_deferred = False
        self._items.num_items = None

    def _record(self, *, divisor: int, metrics: Mapping[str, float] | None = None) -> None:
        self.ledger.note(
            step=self.step,
            ready=self._ready.copy(),
            began_at=self._began_at,
            divisor=divisor,
            counted_items=self._items.num_items is not None,
            buckets=self._sent if self._synchronizing else (),
            nonfinite=self.nonfinite.last,
            metrics=self.metrics.last if metrics is None else metrics,
        )


def _gradients_of(parameters: Sequence[Tensor], layout: BucketLayout) -> Iterator[Tensor | None]:
    """Yield the `.grad` of each parameter; with shards, the stand-ins that represent them until the next backward."""
    shares = layout.shares()
    for share in shares:
        yield from share.stand_ins
    if not shares:
        yield from (parameter.grad for parameter in parameters)


def reducers_of(parameters: Iterable[Tensor]) -> list[GradientSync]:
    """Return the reducers that exist, have their hooks, and reduce the gradients of any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    known = REGISTRY.living(GradientSync)
    return [one for one in known if one.handles and any(id(p) in wanted for p in one.parameters)]
