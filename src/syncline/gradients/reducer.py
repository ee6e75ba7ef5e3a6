"""The reducer, which averages gradients: hooks fill buckets, and buckets are reduced while backward is running.

`docs/inside/architecture.md` has a picture of one backward, and `backward.py` has its states. The steps of a backward
are:

1. The first gradient that is ready begins the backward. At this point the reducer decides whether the backward
   synchronizes, and queues a callback for its end in the autograd engine.
2. Each ready gradient is counted and copied into its bucket. A large gradient is copied at once, and a small one when
   its bucket is launched.
3. Buckets whose gradients are all ready are launched, strictly in index order.
4. At the end of backward the remaining buckets are launched, with zeros for missing gradients. The reducer waits for
   all buckets, reads the tail of the last one, and sets `.grad` to the mean (`reduction.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from syncline._torch.autograd import (
    NO_TASK,
    current_graph_task_id,
    is_in_compiled_backward,
    is_rpc_in_use,
    queue_callback,
    reaches_all_leaves,
    set_grad_enabled,
)
from syncline.events import OBSERVERS, Source
from syncline.gradients.backward import (
    Backward,
    BackwardState,
    Entry,
    GraphTasks,
    Ownership,
    refuse_distributed_autograd,
    refuse_graph_capture,
)
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.hooks import ParameterHooks
from syncline.gradients.layout import BucketLayout
from syncline.gradients.ledger import Ledger
from syncline.gradients.options import Announced, Controls, GradientOptions
from syncline.gradients.outputs import Outputs
from syncline.gradients.reduction import Reduction
from syncline.gradients.riders.roster import Roster
from syncline.gradients.state import Carry, StepState
from syncline.gradients.step_guard import StepGuard
from syncline.gradients.step_times import BACKWARD, DATA, FORWARD
from syncline.gradients.usage import is_accumulating
from syncline.liveness.board import StepPhase
from syncline.optimizers.attached import weakly
from syncline.session.registry import REGISTRY
from syncline.transport.base import Transport


class GradientSync:
    """A reducer, which averages the gradients of its parameters in each backward until `remove_hooks` is called.

    Two backwards of the same parameters must not run at once.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
        main_lane: the transport for reductions outside of a backward (`sl.sync_gradients_`). If it is not the same
            object as `transport`, only this reducer uses the connections of `transport`.
        state: the state of the wrapper's steps.
        title: the name of the module in events.
        comm_hook: the communication hook that reduces the buckets, unless `carry` has one; None for the transport's
            all_reduce.
        carry: what `retire` of the reducer returned that this one replaces; None if this is the first one.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
        *,
        main_lane: Transport,
        state: StepState,
        title: str = "module",
        comm_hook: CommHook | None = None,
        carry: Carry | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.main_lane = main_lane
        self.state = state
        self.controls: Controls = state.controls
        self.tasks = GraphTasks()
        """The graph tasks of the present backward."""
        self.reduction: Reduction = Reduction(
            named_parameters,
            transport,
            options,
            state=state,
            has_own_connection=transport is not main_lane,
            comm_hook=comm_hook,
            carry=carry,
        )
        self.riders: Roster = self.reduction.riders
        """The roster, which has each rider of this reducer as an attribute."""
        self.parameters: list[Tensor] = self.reduction.parameters
        self.layout: BucketLayout = self.reduction.layout
        self.outputs: Outputs = self.riders.forwards.outputs
        """The outputs of the wrapper's forwards, which backwards reach before they reach parameters."""
        if options.static_graph:
            self.outputs.call_when_reached(weakly(self._outputs_reached))
        self.ownership = Ownership(
            self.parameters, self.controls, self.tasks, allows_unused=options.allow_unused
        )
        """The record that decides whether this wrapper takes part in a backward, if others share parameters with it."""
        self._hooks = ParameterHooks(
            self.reduction, self.tasks, self.ownership, begin=self.begin, complete=self._complete
        )
        self._guard = StepGuard(self.reduction, self.tasks, state, finish=weakly(self.finish))
        state.use(self)
        self.ledger: Ledger = state.ledger
        self.ledger.use(
            Source(main_lane.rank, title),
            self.names,
            num_ranks=main_lane.size,
            looks_for_unused=options.allow_unused,
        )
        others = reducers_of(self.parameters)
        self.ownership.add_rivals(other.ownership for other in others)
        own = set(map(id, self.parameters))
        for other in others:
            other.layout.give_back_views()
            if carry is None and own == set(map(id, other.parameters)) and not other.tasks.is_running:
                other.controls.forget_reduction()
        REGISTRY.add(self)

    # ------------------------------------------------------------------ for others to read

    @property
    def options(self) -> GradientOptions:
        """The options of gradient synchronization."""
        return self.reduction.options

    @property
    def step(self) -> int:
        """Number of steps of the run so far, including steps before a resume. Messages and records show this number."""
        return self.state.step

    @property
    def has_hooks(self) -> bool:
        """Whether the hooks are registered, so that backwards are reduced; False after `remove_hooks`."""
        return self._hooks.are_registered

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self.tasks.is_running

    @property
    def waits_for_more(self) -> bool:
        """Whether the last backward has not ended, because a further one may bring the gradients that are missing."""
        return self.tasks.is_unfinished

    @property
    def has_unreduced(self) -> bool:
        """Whether `.grad` holds gradients of backwards under `no_sync`, which were not reduced yet."""
        return bool(self.reduction.unreduced) and self.reduction.sends

    # ------------------------------------------------------------------ between backwards

    def use_metrics(self, names: Sequence[str]) -> None:
        """Report the metrics with these names from now on. All ranks must make this call, between two backwards."""
        self.riders.metrics.use_names(names)
        self.layout.reserve_tail(self.riders.widths)

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on. The hook receives undivided gradients and must divide them.

        Raises:
            RuntimeError: a hook is already registered, or a backward is running.
            ValueError: this call is inside of a block of `normalize_by`, and the hook is not known to return a mean.
        """
        if self.layout.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: communication hook "
                f"{self.layout.comm_hook.name} is already registered. To use another hook, wrap the module again"
            )
        if self.tasks.is_running:
            raise RuntimeError(
                "register_comm_hook must be called between two backwards, but it was called during the backward of "
                f"step {self.step + 1}. Call it before or after loss.backward()"
            )
        if self.state.normalizer.count.is_open:
            hook.refuse_own_division(
                "Use either this hook or normalize_by. To use the hook, leave the block of normalize_by first"
            )
        self.reduction.use_comm_hook(hook)
        if hook.lets_replicas_drift:
            self.riders.look.stop()

    def reduced_outside(self, indices: Collection[int], *, num_items: int | None, was_changed: bool) -> None:
        """Record that `.grad` of some parameters was reduced outside of a backward.

        Args:
            indices: indices of these parameters. If items are counted, these must be all parameters.
            num_items: the number of items by which the sum was divided; None if it was divided by the number of ranks.
            was_changed: whether the result of an earlier reduction had been changed (see `Standing.is_changed`).
        """
        self.reduction.unreduced.difference_update(indices)
        if not self.reduction.unreduced:
            self.state.normalizer.was_reduced_outside(is_known=num_items is not None or not was_changed)
        nonfinite = self.riders.nonfinite
        nonfinite.conclude_outside([(i, self.parameters[i].grad) for i in indices], step=self.step)
        self.ledger.note_reduction(num_items=num_items, num_ranks=self.reduction.transport.size)
        self.ledger.note_nonfinite(nonfinite.last)
        nonfinite.act()

    def discards_step(self) -> bool:
        """Return whether attached optimizers must skip their step, because `.grad` holds discarded gradients."""
        reduction, nonfinite = self.reduction, self.riders.nonfinite
        if reduction.unreduced and not reduction.sends and nonfinite.last is not None:
            # In a world of one rank, gradients of backwards under no_sync may be applied without any reduction.
            reduction.unreduced.clear()
            reduction.check_finite_alone(self.step)
            self.ledger.note_nonfinite(nonfinite.last)
            nonfinite.act()
        return nonfinite.discards_step()

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters, so that later backwards are not reduced."""
        self._hooks.remove()
        self._guard.remove()
        self.ownership.withdraw()

    def retire(self, transport: Transport) -> Carry:
        """Leave the parameters to another reducer, and return what it takes over.

        Args:
            transport: the transport of the other reducer. If it is a new one, this is a collective call.
        """
        self.remove_hooks()
        self.layout.give_back_views()
        return self.reduction.retire(transport)

    # ------------------------------------------------------------------ a backward begins

    def forward_begins(self) -> None:
        """Record that a forward begins, so that later gradients are not attributed to a backward that has ended.

        Raises:
            SynclineError: see `finish`.
        """
        if torch.is_grad_enabled():
            if self.tasks.is_running:
                self.finish("a forward")
            if self.reduction.sends:
                self._hooks.restore_swapped()
                self.reduction.clock.enter(FORWARD)
        if self.tasks.has_ended_inside:
            self.tasks.forward_begins()
        if is_rpc_in_use():
            refuse_distributed_autograd(rank=self.main_lane.rank, step=self.step + 1)

    def forward_ended(self, output: object, *, owner: object, is_counted: bool) -> None:
        """Record that a forward with gradients enabled has run. The arguments are those of `Outputs.watch`."""
        self.controls.forward_ended()
        if self.riders.look.is_due:
            self.riders.look.forward_ended()
        is_static = self.reduction.usage.static is not None
        if self.reduction.sends or is_static:
            is_counted = is_counted and self.reduction.sends and self.controls.decide()
            self.outputs.watch(output, owner=owner, is_counted=is_counted, all_tensors=is_static)

    def _outputs_reached(self, task: int) -> None:
        """Begin a backward of a static graph that has reached an output of the wrapper.

        The backward of a re-entrant checkpoint runs inside the backward that begins at an output.
        """
        if self._hooks.are_registered:
            self.tasks.outermost = task
            if is_accumulating(self.parameters):
                self.begin()

    def finish(self, before: str, needs_mean: bool = False) -> None:
        """End the last backward if it waits for more gradients, because there will be none: a new step begins.

        Args:
            before: what begins now.
            needs_mean: whether it needs reduced gradients, so that also a backward which has sent nothing is an error.

        Raises:
            UnreducedGradients: some parameters got no gradient. Each rank raises it, once it has come here.
            SynclineError: an exception interrupted the backward, or its gradients came from re-entrant checkpoints and
                some parameters got none, which they may.
        """
        if not self.tasks.is_running or current_graph_task_id() != NO_TASK:
            return
        backward, out_of_step = self.reduction.backward, self.reduction.out_of_step
        out_of_step.raise_again()
        if self.tasks.is_unfinished:
            if backward.state is BackwardState.LOCAL or backward.is_compiled or not self.options.allow_unused:
                with torch.no_grad():
                    self._end(backward)
                return
            missing = sorted(set(range(len(self.parameters))).difference(backward.ready))
            self._leave(BackwardState.FAILED)
            raise out_of_step.unfinished(backward.step, missing)
        if backward.state is not BackwardState.LOCAL and (needs_mean or self._has_sent(backward)):
            self._leave(BackwardState.FAILED)
            raise out_of_step.interrupted(backward.step, backward.num_launched, before)

    def _has_sent(self, backward: Backward) -> bool:
        has_exchanged = backward.state is not BackwardState.LOCAL and self.reduction.usage.is_exchanged
        return bool(backward.num_launched or has_exchanged)

    def is_local_now(self) -> bool:
        """Return whether a backward that begins now stays local: it or all forwards before it run under `no_sync`."""
        return not self.controls.enabled or self.controls.announced is Announced.LOCAL

    def take_first(self, parameter: Tensor) -> None:
        """Take a gradient that became ready just before the hooks of this reducer were registered."""
        self._hooks.report(parameter)

    def begin(self, index: int | None = None) -> bool:
        """Record the graph task that is running: one pass of autograd over a graph.

        The task begins a backward, or it is an inner or outer task of the present backward.

        Args:
            index: the index of the parameter whose gradient is ready; None if there is no gradient yet.

        Returns:
            Whether this reducer takes the gradient.

        Raises:
            SynclineError: a gradient came too late, a backward interrupted another one, or the backward is being
                captured into a CUDA graph.
        """
        task = current_graph_task_id()
        if self.ownership.rivals and not self.tasks.knows(task) and not self.ownership.takes_part_in(task):
            return False
        reduction = self.reduction
        if reduction.out_of_step.text is not None:
            reduction.out_of_step.raise_again()
        if self.parameters[0].is_cuda:
            refuse_graph_capture(rank=reduction.transport.rank, step=self.step + 1, phase="backward")
        entry = self.tasks.enter(task)
        if entry is Entry.CONTINUES:
            if not self.tasks.knows(task):
                self._join_task(task)
            return True
        if entry is Entry.INTERRUPTS:
            self._abandon()
        elif entry is Entry.TOO_LATE:
            raise reduction.out_of_step.too_late(self.step)
        if reduction.sends:
            reduction.clock.enter(BACKWARD)
        accumulates = self.is_local_now()
        num_contributing = self.controls.backward_begins(accumulates=accumulates)
        reducer: GradientSync | None = self.state.reducer()
        if reducer is not None and reducer is not self:  # the module had changed
            if index is None:
                reducer._outputs_reached(task)
            else:
                reducer.take_first(self.parameters[index])
            return False
        reduction.riders.nonfinite.backward_begins(has_hook=reduction.layout.comm_hook is not None)
        reduction.state.normalizer.count.backward_begins()
        reduction.begin(self._new_backward(accumulates, num_contributing))
        self._join_task(task)
        return True

    def _join_task(self, task: int) -> None:
        self.tasks.join(task)
        backward = self.reduction.backward
        backward.reaches_all = backward.reaches_all and reaches_all_leaves()
        if backward.is_compiled:
            self.tasks.wait_for_more()
        else:
            queue_callback(partial(self._end_of_task, task))

    def _complete(self) -> None:
        """End a backward of which no end is reported, if no gradient is missing."""
        backward = self.reduction.backward
        if len(backward.ready) + len(backward.missing) >= len(self.parameters):
            self._end(backward)

    def _new_backward(self, accumulates: bool, num_contributing: int | None) -> Backward:
        """Return a `Backward` for the backward that begins now.

        Its state says whether this backward is reduced, and when the buckets are filled.

        Args:
            accumulates: whether a later backward will reduce the gradients of this one.
            num_contributing: the number of ranks whose gradients count; None for all ranks.
        """
        controls, reduction = self.controls, self.reduction
        state, has_graph, is_compiled = BackwardState.LOCAL, False, is_in_compiled_backward()
        if not accumulates and reduction.sends and controls.decide():
            state, has_graph = BackwardState.FILLING, torch.is_grad_enabled()
            if has_graph:
                reduction.check_graph(self.step + 1)
            static = reduction.usage.static
            is_learning = static is not None and not static.is_learnt
            if has_graph or is_learning or is_compiled:
                state = BackwardState.DEFERRED
        num_items = None if accumulates else reduction.state.normalizer.count.take_for_reduction()
        num_ranks = num_contributing or reduction.transport.size
        is_sum = num_items is not None or reduction.layout.comm_hook is not None
        return Backward(
            step=self.step + 1,
            state=state,
            num_items=num_items,
            num_ranks=num_ranks,
            scale=1.0 if is_sum else 1.0 / num_ranks,
            accumulates=accumulates,
            reaches_all=True,
            is_compiled=is_compiled,
            is_local_by_forward=accumulates and controls.enabled,
            keeps_tensors=has_graph,
            ready=self.ledger.observed_list(self.step + 1) if OBSERVERS.gradient_ready else [],
        )

    def _abandon(self) -> None:
        """Abandon the previous backward, which has not ended: either an error interrupted it, or it still runs.

        Raises:
            SynclineError: the previous backward has already sent data, so the ranks are out of step.
        """
        backward = self.reduction.backward
        has_sent = self._has_sent(backward)
        self._leave(BackwardState.FAILED)
        if has_sent:
            raise self.reduction.out_of_step.interrupted(
                backward.step, backward.num_launched, "another backward"
            )

    # ------------------------------------------------------------------ a backward ends

    def _end_of_task(self, task: int, *, is_copied: bool = False) -> None:
        """End the backward if `task` was its last graph task.

        Args:
            task: the number of the graph task that has just ended.
            is_copied: whether an earlier call has found that the backward ends with `task`, and has sent its gradients.
        """
        reduction = self.reduction
        backward = reduction.backward
        is_complete = len(backward.ready) >= len(reduction.parameters)
        if not is_copied:
            if not self.tasks.ends_backward(task, is_complete=is_complete):
                return
            if not is_complete and self._may_get_more(backward) and not self._report_lost():
                self.tasks.wait_for_more()
                return
        records_graph = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            if self.ownership.rivals and not is_copied and backward.state is not BackwardState.LOCAL:
                # The backward may also belong to another wrapper. So each wrapper copies its gradients before any of
                # them changes `.grad`.
                self._send_rest()
                queue_callback(partial(self._end_of_task, task, is_copied=True))
                return
            self._end(backward)
        finally:
            set_grad_enabled(records_graph)

    def _may_get_more(self, backward: Backward) -> bool:
        """Return whether a further backward over the same graphs may bring the gradients that are missing.

        One forward may have several losses, whose backwards reach different parameters.
        """
        if self.options.allow_unused or backward.accumulates:
            return False
        is_known = self.tasks.knows(self.outputs.reached_in)
        return not (backward.reaches_all and is_known and not self.outputs.num_open)

    def _end(self, backward: Backward) -> None:
        """End the present backward, and run the program's hooks that had to wait for its result."""
        normalizer, nonfinite = self.reduction.state.normalizer, self.reduction.riders.nonfinite
        try:
            self._finish(backward)
            if normalizer.count.open_was_used:
                normalizer.backward_is_done()
            nonfinite.act()
        except BaseException:
            nonfinite.failed()
            self._leave(BackwardState.FAILED)
            raise
        self._leave(BackwardState.ENDED)
        self.controls.backward_ends(accumulates=backward.accumulates)
        if self._hooks.deferred:
            self._hooks.run_deferred()

    def _finish(self, backward: Backward) -> None:
        """Reduce the gradients of a backward, unless it runs under `no_sync`. Then record the backward."""
        reduction = self.reduction
        is_local = backward.state is BackwardState.LOCAL
        divisor = 1
        if backward.accumulates:
            reduction.unreduced.update(backward.ready)
        else:
            if is_local:
                self.state.step_is(backward.step)
                divisor = reduction.collect_alone()
            else:
                divisor = self._reduce(backward)
            reduction.unreduced.clear()
        timing = None
        if not is_local:
            timing = reduction.end_step(self.step)
        elif reduction.sends:
            reduction.clock.enter(DATA)
        facts = reduction.riders.record()
        self.ledger.note(backward, step=self.step, divisor=divisor, facts=facts, timing=timing)
        if not is_local and not reduction.layout.order_is_learnt:
            reduction.layout.learn_order(backward.ready)

    @torch.no_grad()
    def _report_lost(self) -> bool:
        """Report gradients whose hooks were lost. Return whether there are gradients of all parameters now."""
        reduction, backward = self.reduction, self.reduction.backward
        missing = set(range(len(self.parameters))).difference(backward.ready)
        late = [i for i in self._hooks.restore(missing) if self.parameters[i].grad is not None]
        reduction.report_late(late)
        return len(backward.ready) >= len(self.parameters)

    def _send_rest(self) -> None:
        """Send what is left, also gradients whose hooks were lost, so that they were not reported."""
        if len(self.reduction.backward.ready) < len(self.parameters):
            self._report_lost()
        self.reduction.send_rest()

    def _reduce(self, backward: Backward) -> int:
        self._send_rest()
        self.state.step_is(backward.step)
        # If `.grad` became a view, one wrapper could scale a gradient in place before another one has copied it. The
        # other wrapper may have got the parameter in this backward.
        backward.keeps_tensors |= bool(self.ownership.rivals)
        return self.reduction.collect()

    def shadow(self) -> None:
        """Send zeros in a synchronized backward of the other ranks, because this rank has no inputs left."""
        self.state.step_is(self.step + 1)
        nonfinite = self.riders.nonfinite
        nonfinite.backward_begins(has_hook=self.layout.comm_hook is not None)
        try:
            self.reduction.take_part_with_zeros(Backward(step=self.step, state=BackwardState.FILLING))
            self.reduction.end_step(self.step)
            nonfinite.act()
        except BaseException:
            self._leave(BackwardState.FAILED)
            raise
        self._leave(BackwardState.ENDED)

    def _leave(self, state: BackwardState) -> None:
        """End the present backward in the state `state`, and reset everything that belongs to this backward."""
        reduction = self.reduction
        if reduction.backward.state is not BackwardState.LOCAL:
            reduction.riders.forget()
            board = reduction.transport.board
            board.phase, board.bucket = StepPhase.AFTER_BACKWARD, None
        self.tasks.forget()
        reduction.backward.move(state)
        if state is BackwardState.FAILED:
            self._hooks.drop_deferred()


def reducers_of(parameters: Iterable[Tensor]) -> list[GradientSync]:
    """Return the reducers that have at least one of these parameters, and whose hooks are still registered."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        reducer
        for reducer in REGISTRY.living(GradientSync)
        if reducer.has_hooks and any(id(parameter) in wanted for parameter in reducer.parameters)
    ]
