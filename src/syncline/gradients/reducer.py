"""Gradient synchronization: hooks fill buckets, and buckets are reduced while backward is running.

One backward, in order (`docs/architecture.md` has the picture, `backward.py` the table of its states):

1. The first gradient that is ready begins the backward. This decides if the backward synchronizes, and a callback for
   its end is queued in the autograd engine.
2. Each ready gradient is counted and copied into its bucket (large ones at once, small ones at launch).
3. A bucket whose gradients are all ready is launched, strictly in index order.
4. At the end of backward the remaining buckets are launched, with zeros for missing gradients. All buckets are waited
   for, the tail of the last one is read, and `.grad` gets the mean (`reduction.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from syncline._torch.autograd import current_graph_task_id, queue_callback
from syncline._torch.tensors import foreach_div_
from syncline.errors import SynclineError
from syncline.gradients.backward import Backward, BackwardState, Entry, GraphTasks, Ownership
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.distributed_autograd import AutogradContexts
from syncline.gradients.hooks import gradient_hook
from syncline.gradients.layout import BucketLayout
from syncline.gradients.ledger import Ledger
from syncline.gradients.options import Controls, GradientOptions
from syncline.gradients.reduction import Reduction
from syncline.gradients.riders.items import ItemNormalizer
from syncline.gradients.riders.replica_watch import ReplicaWatch
from syncline.gradients.riders.roster import Roster
from syncline.gradients.usage import is_accumulating
from syncline.session.registry import REGISTRY
from syncline.transport.base import Transport
from syncline.user_code import warn_user


class GradientSync:
    """The reducer of some parameters' gradients, active in each backward.

    It stays active until `remove_hooks`. It is not safe for two backwards of the same parameters at once.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
        main_lane: the transport on which ranks agree if gradients are reduced outside of a backward. If it is not
            `transport`, nothing else uses the connections of `transport`.
        former: the object that this one replaces, because the module or its group has changed. Its state is taken over,
            and its hooks are removed.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
        *,
        main_lane: Transport,
        former: GradientSync | None = None,
    ) -> None:
        if former is not None:
            former.remove_hooks()
            former.layout.give_back_views()
        self.main_lane = main_lane
        self.reduction: Reduction = Reduction(
            named_parameters,
            transport,
            options,
            has_own_connection=transport is not main_lane,
            former=None if former is None else former.reduction,
        )
        self.controls: Controls = Controls() if former is None else former.controls
        self.ledger = Ledger(self.names)
        self.step: int = 0 if former is None else former.step
        """Number of steps of the run so far, as used in messages and records; includes steps before a resume."""
        self._steps_before: int = 0 if former is None else former._steps_before
        self.backward = Backward(step=0, state=BackwardState.ENDED)
        """The backward that runs, or the last one."""
        self._unreduced = set() if former is None else former._unreduced_among(self.parameters)
        """Indices of the parameters that hold gradients of backwards that were not reduced."""
        self._has_warned_of_graph: bool = former is not None and former._has_warned_of_graph
        self.tasks = GraphTasks()
        """The graph tasks of the present backward."""
        self.ownership = Ownership(self.parameters)
        """Tells backwards of this wrapper apart from those of another wrapper with some of the same parameters."""
        if former is not None:
            self.ownership.continues(former.ownership)
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(gradient_hook(self, index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._contexts = AutogradContexts.of_this_process(self.parameters, self._context_gradient_is_ready)
        if self._contexts is not None:
            self._handles += self._contexts.handles
        rivals = reducers_of(self.parameters)
        self.ownership.share_with(other.ownership for other in rivals)
        for other in rivals:
            other.layout.give_back_views()
        REGISTRY.add(self)

    def _unreduced_among(self, parameters: Sequence[Tensor]) -> set[int]:
        """Return the indices of those of these parameters that hold gradients that were not reduced."""
        unreduced = {id(self.parameters[index]) for index in self._unreduced}
        return {index for index, parameter in enumerate(parameters) if id(parameter) in unreduced}

    # ------------------------------------------------------------------ for others to read

    @property
    def names(self) -> list[str]:
        """Names of all parameters, by index."""
        return self.reduction.names

    @property
    def parameters(self) -> list[Tensor]:
        return self.reduction.parameters

    @property
    def options(self) -> GradientOptions:
        return self.reduction.options

    @property
    def layout(self) -> BucketLayout:
        """The buckets."""
        return self.reduction.layout

    @property
    def riders(self) -> Roster:
        """The riders, by name."""
        return self.reduction.riders

    @property
    def normalizer(self) -> ItemNormalizer:
        """The counts of items behind `.grad`."""
        return self.reduction.normalizer

    @property
    def has_hooks(self) -> bool:
        """Whether backwards are still seen; False after `remove_hooks`."""
        return bool(self._handles)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self.tasks.is_running

    @property
    def has_unreduced(self) -> bool:
        """Whether `.grad` holds gradients that were not reduced, because the last backwards ran under `no_sync`."""
        return bool(self._unreduced) and self.reduction.sends

    @property
    def num_backwards(self) -> int:
        """Number of synchronized backwards so far, of this object and of those whose state it took over."""
        return self.step - self._steps_before

    # ------------------------------------------------------------------ between backwards

    def use_metrics(self, names: Sequence[str]) -> None:
        """Report these metrics from now on; the same on all ranks, between two backwards."""
        self.riders.metrics.use_names(names)
        self.layout.reserve_tail(self.riders.widths)

    def use_comm_hook(self, hook: CommHook) -> None:
        """Reduce buckets by `hook` from now on. The hook gets undivided gradients, and has to divide them.

        Raises:
            RuntimeError: there is a hook already, or a backward has begun and not ended.
            ValueError: the hook does its own division and is registered inside of `normalize_by`.
        """
        if self.layout.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: "
                f"{self.layout.comm_hook.name} is registered"
            )
        if self.tasks.is_running:
            raise RuntimeError(
                "register_comm_hook must be called between two backwards, got it in the backward of step "
                f"{self.step + 1}"
            )
        if self.normalizer.count.is_open:
            hook.refuse_own_division(
                "Leave the block of normalize_by before the hook is registered, and use one or the other"
            )
        self.layout.build(hook)

    def compare_replicas_by(self, watch: ReplicaWatch | None) -> None:
        """Compare replicas in each synchronized backward from now on; None: do not compare them."""
        self.riders.replicas.use(watch)

    def resume_from_step(self, step: int) -> None:
        """Continue to count from a step, because parameters that were saved after it have been loaded.

        Only messages and records may depend on this number. One rank may load alone and broadcast the loaded values, so
        ranks may differ in it.
        """
        self.step, self._steps_before = step, step - self.num_backwards
        if (watch := self.riders.replicas.watch) is not None:
            watch.steps_before = self._steps_before
            watch.agreed_at(None)

    def mark_replicas_equal(self) -> None:
        """Record that all ranks have just compared their replicas, which were equal."""
        if (watch := self.riders.replicas.watch) is not None:
            watch.agreed_at(self.num_backwards)

    def reduced_outside(self, indices: Collection[int], *, num_items: int | None, was_changed: bool) -> None:
        """Record that `.grad` of these parameters was reduced outside of a backward.

        Args:
            indices: indices of the parameters; all of them if items are counted.
            num_items: the number of items that the sum was divided by; None if it was divided by the number of ranks.
            was_changed: whether a mean left by an earlier reduction was changed before this one, see `Standing`.
        """
        self._unreduced.difference_update(indices)
        if not self._unreduced:
            self.normalizer.was_reduced_outside(is_known=num_items is not None or not was_changed)
        divisor = self.reduction.transport.size if num_items is None else num_items
        nonfinite = self.riders.nonfinite
        nonfinite.conclude_outside([(i, self.parameters[i].grad) for i in indices], step=self.step)
        self.ledger.note_reduction(
            divisor=divisor, counted_items=num_items is not None, nonfinite=nonfinite.last
        )
        nonfinite.act()

    def discards_step(self) -> bool:
        """Return whether attached optimizers must skip their step, because `.grad` is not finite."""
        nonfinite = self.riders.nonfinite
        if self._unreduced and not self.reduction.sends and nonfinite.last is not None:
            # In a world of one rank, gradients of backwards under no_sync may be applied without any reduction.
            self._unreduced.clear()
            self._conclude_alone()
            self.ledger.note_judgement(nonfinite.last)
            nonfinite.act()
        return nonfinite.discards_step()

    def _conclude_alone(self) -> None:
        """Check all of `.grad` for values that are not finite, because there is one rank."""
        gradients = [(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        self.riders.nonfinite.conclude_alone(gradients, step=self.step)

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.ownership.withdraw()

    # ------------------------------------------------------------------ a backward begins

    def forward_begins(self) -> None:
        """Note that a forward begins, so that the next backward starts a new step."""
        self.tasks.forward_begins()
        if self._contexts is not None:
            self._contexts.forward_begins()

    def _context_gradient_is_ready(self, index: int, context_id: int) -> None:
        """Mark a gradient of distributed autograd as ready.

        An ordinary backward runs this hook, too. It is ignored then, because the ordinary hook has marked the gradient.
        """
        if self.tasks.is_running and self.backward.context_id is None:
            return
        if current_graph_task_id() != self.tasks.current and not self.begin(context_id):
            return
        self.backward.ready.append(index)

    def outermost_hook(self) -> Callable[[object], None]:
        """Return a hook for a forward's outputs; a graph task that reaches one is not inside of another task."""
        tasks, current_task = self.tasks, current_graph_task_id

        def backward_begins(_: object) -> None:
            if current_task() != tasks.outermost and self._handles:  # no handles: the hooks were removed
                tasks.outermost = current_task()
                if is_accumulating(self.parameters):
                    self.begin()

        return backward_begins

    def begin(self, context_id: int | None = None) -> bool:
        """Register a graph task: it begins a new backward, or continues one in an inner or outer task.

        Args:
            context_id: the context of distributed autograd; None for an ordinary backward.

        Returns:
            Whether it is a backward of this wrapper.
        """
        task = current_graph_task_id()
        if self.ownership.rivals and not self.tasks.knows(task) and not self.ownership.owns(task):
            return False
        reduction = self.reduction
        if reduction.out_of_step.text is not None:
            reduction.out_of_step.raise_again()
        entry = self.tasks.enter(task)
        if entry is Entry.CONTINUES:
            if not self.tasks.knows(task):
                self._join_task(task)
            return True
        if entry is Entry.INTERRUPTS:
            self._abandon()
        elif entry is Entry.TOO_LATE:
            raise reduction.out_of_step.too_late(self.step)
        self.controls.backward_begins()
        reduction.riders.nonfinite.backward_begins(has_hook=reduction.layout.comm_hook is not None)
        reduction.normalizer.count.backward_begins()
        self.backward = self._new_backward(context_id)
        reduction.begin(self.backward)
        self._join_task(task)
        return True

    def _new_backward(self, context_id: int | None) -> Backward:
        """Decide whether the backward that begins now synchronizes, and when its buckets are filled."""
        controls, reduction = self.controls, self.reduction
        state, has_graph = BackwardState.LOCAL, False
        if controls.enabled and reduction.sends and controls.decide():
            state, has_graph = BackwardState.FILLING, torch.is_grad_enabled()
            if has_graph:
                self._check_graph()
            static = reduction.usage.static
            is_learning = static is not None and not static.is_learnt
            if has_graph or context_id is not None or is_learning:
                state = BackwardState.DEFERRED
        num_items = reduction.normalizer.count.take_for_reduction() if controls.enabled else None
        num_ranks = reduction.transport.size
        if controls.num_contributing is not None:
            num_ranks = controls.take_num_contributing()
        is_sum = num_items is not None or reduction.layout.comm_hook is not None
        return Backward(
            step=self.step + 1,
            state=state,
            num_items=num_items,
            num_ranks=num_ranks,
            scale=1.0 if is_sum else 1.0 / num_ranks,
            unreduced=self._unreduced,
            context_id=context_id,
            has_graph=has_graph,
        )

    def _check_graph(self) -> None:
        """Raise or warn, because the backward runs under create_graph=True and only values are reduced.

        Raises:
            SynclineError: gradients are sharded.
        """
        rank = self.reduction.transport.rank
        if self.options.sharded:
            raise SynclineError(
                f"rank {rank}, step {self.step + 1}: backward(create_graph=True) is not possible with sharded=True, "
                "where reduced gradients lie in shards without a graph. Use torch.autograd.grad for the inner "
                "gradients, or wrap the module without sharded=True"
            )
        if rank or self._has_warned_of_graph:
            return
        self._has_warned_of_graph = True
        warn_user(
            f"step {self.step + 1}: backward(create_graph=True): the values of .grad are the mean over ranks, but its "
            "graph is this rank's own, so second derivatives are not averaged. Average what is computed from them "
            "(sl.average_), or take an inner gradient by torch.autograd.grad(..., create_graph=True) and run a plain "
            "backward() on the loss, which is averaged. This warning comes once"
        )

    def _join_task(self, task: int) -> None:
        self.tasks.join(task)
        queue_callback(partial(self._end_of_task, task))

    def _abandon(self) -> None:
        """Abandon an earlier backward that has not ended, because user code in it raised or because it still runs.

        Raises:
            SynclineError: that backward had sent data, so the ranks are out of step.
        """
        former = self.backward
        has_sent = former.num_launched or (former.is_synchronized and self.reduction.usage.is_exchanged)
        self._leave(BackwardState.FAILED)
        if has_sent:
            raise self.reduction.out_of_step.interrupted(self.step + 1, former.num_launched)

    # ------------------------------------------------------------------ a backward ends

    @torch.no_grad()
    def _end_of_task(self, task: int, *, is_copied: bool = False) -> None:
        """Finish the backward if it has ended with this graph task; it has not if an outer task continues it."""
        backward, reduction = self.backward, self.reduction
        if not is_copied and not self.tasks.ends_backward(
            task, is_complete=len(backward.ready) >= len(reduction.parameters)
        ):
            return
        try:
            if backward.is_synchronized:
                if self.ownership.rivals and not is_copied and backward.context_id is None:
                    # The backward may be another wrapper's, too. So each copies its gradients before any changes
                    # `.grad`.
                    reduction.send_rest(backward)
                    queue_callback(partial(self._end_of_task, task, is_copied=True))
                    return
                self._finish_synchronized(backward)
            elif self.controls.enabled:
                self._finish_alone(backward)
            else:
                self._unreduced.update(backward.ready)
                self._record(backward, divisor=1, metrics={})
            reduction.normalizer.backward_is_done()
            reduction.riders.nonfinite.act()
        except BaseException:
            reduction.riders.nonfinite.failed()
            self._leave(BackwardState.FAILED)
            raise
        self._leave(BackwardState.ENDED)
        self.controls.backward_ends()

    def _finish_synchronized(self, backward: Backward) -> None:
        """Send the rest, wait, and set `.grad` to the result."""
        if backward.context_id is None:
            divisor = self._reduce(backward)
        else:
            if self.options.sharded:
                raise SynclineError(
                    "distributed autograd keeps gradients in its own contexts, which sharded=True cannot shard: "
                    "wrap the module without sharded=True"
                )
            assert self._contexts is not None
            with self._contexts.as_grad(backward.context_id):
                divisor = self._reduce(backward)
        self._record(backward, divisor=divisor, metrics=self.reduction.riders.metrics.last)
        if not self.reduction.layout.order_is_learnt:
            self.reduction.layout.learn_order(backward.ready)

    def _reduce(self, backward: Backward) -> int:
        self.reduction.send_rest(backward)
        self.step = backward.step
        # With views, one wrapper could scale in place a gradient that another wrapper has not copied yet.
        keeps_tensors = backward.has_graph or bool(self.ownership.rivals)
        divisor = self.reduction.collect(backward, keeps_tensors=keeps_tensors)
        self._unreduced.clear()
        return divisor

    def _finish_alone(self, backward: Backward) -> None:
        """Finish a backward of a world of one rank, or one that stays local, by the same rules but without sending."""
        transport, riders = self.reduction.transport, self.riders
        backward.missing = self.reduction.missing(backward)
        self.step = backward.step
        riders.missing.check_alone(backward, rank=transport.rank, num_ranks=transport.size)
        if riders.static_graph is not None:
            riders.static_graph.check_alone(backward, rank=transport.rank, num_ranks=transport.size)
        divisor = 1
        if backward.num_items is not None:
            divisor = self.normalizer.total([backward.num_items], step=self.step)
            foreach_div_([p.grad for p in self.parameters if p.grad is not None], float(divisor))
        if self.reduction.usage.static is not None:
            self.reduction.usage.static.learn()
        if transport.size == 1:
            self._conclude_alone()
        self._unreduced.clear()
        riders.metrics.conclude_alone()
        self._record(backward, divisor=divisor, metrics=riders.metrics.last)

    def shadow(self) -> None:
        """Take part in a synchronized backward of the other ranks with zeros, because this rank has no inputs left."""
        self.backward = Backward(step=self.step + 1, state=BackwardState.FILLING)
        self.riders.nonfinite.backward_begins(has_hook=self.layout.comm_hook is not None)
        try:
            self.step = self.backward.step
            self.reduction.take_part_with_zeros(self.backward)
            self.riders.nonfinite.act()
        except BaseException:
            self._leave(BackwardState.FAILED)
            raise
        self._leave(BackwardState.ENDED)

    def _record(self, backward: Backward, *, divisor: int, metrics: Mapping[str, float]) -> None:
        nonfinite = self.reduction.riders.nonfinite.last
        self.ledger.note(backward, step=self.step, divisor=divisor, nonfinite=nonfinite, metrics=metrics)

    def _leave(self, to: BackwardState) -> None:
        """End the present backward."""
        if self.backward.is_synchronized:
            self.reduction.riders.forget()
            board = self.reduction.transport.board
            board.phase, board.bucket = "after backward", None
        self.tasks.forget()
        self.backward.move(to)


def reducers_of(parameters: Iterable[Tensor]) -> list[GradientSync]:
    """Return the reducers that synchronize the gradients of any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    living = REGISTRY.living(GradientSync)
    return [one for one in living if one.has_hooks and any(id(p) in wanted for p in one.parameters)]
