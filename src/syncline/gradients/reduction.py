"""The reduction of gradients: they are copied into buckets, sent over the transport, and written to `.grad`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from syncline._torch.autograd import UNPROFILED, is_profiling, profiled
from syncline._torch.tensors import foreach_div_
from syncline.errors import SynclineError
from syncline.events import OBSERVERS
from syncline.gradients.backward import NO_INDICES, Backward, BackwardState
from syncline.gradients.bucket import Bucket, DenseBucket
from syncline.gradients.comm_hook import CommHook
from syncline.gradients.layout import BucketLayout
from syncline.gradients.options import GradientOptions
from syncline.gradients.out_of_step import OutOfStep
from syncline.gradients.riders.base import Reduced
from syncline.gradients.riders.roster import Roster
from syncline.gradients.state import Carry, StepState
from syncline.gradients.step_times import Measured, StepClock
from syncline.gradients.tail import Tail
from syncline.gradients.usage import Usage
from syncline.liveness.board import StepPhase
from syncline.transport.base import Transport
from syncline.user_code import warn_user


class Reduction:
    """The part of a reducer that sends buckets in index order, waits for them, and hands out the results.

    Most of the cost is that of Python calls: one per parameter, and a few per bucket. So work is done once per
    bucket wherever possible, and not once per parameter.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
        state: the state of the wrapper's steps.
        has_own_connection: whether only this reduction uses the connections of `transport`. If so, collectives that a
            communication hook starts use other connections.
        comm_hook: the communication hook that reduces the buckets, unless `carry` has one.
        carry: what the reduction that this one replaces has handed over; None if this is the first one.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
        *,
        state: StepState,
        has_own_connection: bool,
        comm_hook: CommHook | None = None,
        carry: Carry | None = None,
    ) -> None:
        self.names = names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.transport = transport
        self.options = options
        self.backward = Backward(step=0, state=BackwardState.ENDED)
        """The backward that runs now, or the last backward if none runs."""
        unreduced = {id(parameter) for parameter in carry.unreduced} if carry is not None else ()
        self.unreduced = {index for index, one in enumerate(self.parameters) if id(one) in unreduced}
        """Indices of the parameters whose `.grad` holds gradients of earlier backwards that were not reduced."""
        self.clock = StepClock(transport)
        self.layout = BucketLayout(named_parameters, transport, options)
        self.usage = Usage(self.parameters, transport, options)
        self.state = state
        state.stragglers.use(state.stragglers.rule)  # the times of other ranks do not count
        state.normalizer.use(self.parameters, transport.size)
        self.riders: Roster = state.riders
        self.riders.use(
            names,
            transport,
            options,
            static=self.usage.static,
            gradients=partial(_tensors_in_grad, self.parameters, self.layout),  # no cycle of references
        )
        self.layout.reserve_tail(self.riders.widths)
        self._has_own_connection = has_own_connection
        text, order = None, None
        if carry is not None:
            comm_hook, text, order = carry.comm_hook or comm_hook, carry.out_of_step, carry.order
        self.out_of_step: OutOfStep = OutOfStep(transport.rank, names, text=text)
        self.sends: bool = transport.size > 1 or comm_hook is not None
        """Whether buckets can be sent: there are other ranks, or a communication hook is registered."""
        if self.sends:
            self.layout.build(comm_hook, order)

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on. Call this method between two backwards."""
        self.layout.build(hook)
        self.sends = True

    def retire(self, transport: Transport) -> Carry:
        """Return what another reduction takes over, which sends over `transport`. See `GradientSync.retire`."""
        unreduced, comm_hook = [self.parameters[index] for index in self.unreduced], self.layout.comm_hook
        if transport is self.transport:
            return Carry(unreduced, comm_hook, order=None, out_of_step=self.out_of_step.text)
        # The ranks are in step, at the same place of the program, so the new buckets get their final memory at once.
        order = self.layout.order_of_rank_0(transport)
        self.layout.free_memory()
        return Carry(unreduced, comm_hook, order, out_of_step=None)

    # ------------------------------------------------------------------ during backward

    def check_graph(self, step: int) -> None:
        """Warn the user that second derivatives are not averaged. Call this if a backward has create_graph=True.

        Args:
            step: the number of the step to which the backward belongs.

        Raises:
            SynclineError: gradients are sharded.
        """
        rank = self.transport.rank
        if self.options.sharded:
            raise SynclineError(
                f"rank {rank}, step {step}: backward(create_graph=True) is not possible with sharded=True, because "
                "sharded gradients have no graph. Compute the gradients that need a graph by torch.autograd.grad(..., "
                "create_graph=True), or wrap the module without sharded=True"
            )
        if rank == 0:
            self.state.warn_once(
                "create_graph",
                f"step {step}: backward(create_graph=True) averages the values of .grad over ranks, but the graph of "
                ".grad belongs to one rank, so second derivatives are not averaged. Either call sl.average_ on the "
                "values that you compute from second derivatives, or compute the gradients that need a graph by "
                "torch.autograd.grad(..., create_graph=True), and then run loss.backward() without create_graph=True, "
                "which averages the gradients of the loss. This warning is shown once",
            )

    def begin(self, backward: Backward) -> None:
        """Prepare for `backward`: reset the buckets and riders, and find the parameters that it will not reach."""
        self.backward, usage = backward, self.usage
        if usage.static is not None:
            usage.static.reset()
        if backward.state is BackwardState.LOCAL:
            return
        self._begin_step()
        if usage.reads_graph:
            backward.missing = usage.absent()
            for index in backward.missing:  # their buckets do not wait for them
                self.layout.places[index][0].num_pending -= 1
        if usage.is_exchanged:
            usage.exchange(set(range(len(self.parameters))) - backward.missing, self.unreduced)

    def _begin_step(self) -> None:
        board, step = self.transport.board, self.backward.step
        board.step, board.phase = step, StepPhase.BACKWARD
        if not self.layout.buckets:
            self.layout.make_buckets()
        for bucket in self.layout.buckets:
            bucket.reset()
        self.riders.begin_step(step)

    def send_complete(self) -> None:
        """Send the complete buckets in index order, up to the first bucket that is not complete."""
        backward, buckets = self.backward, self.layout.buckets
        while backward.num_launched < len(buckets):
            bucket = buckets[backward.num_launched]
            if bucket.num_pending or (self.usage.static is not None and bucket.plan.tail_numel):
                return  # the last bucket reports whether a static graph has changed, which is known only at the end
            self._send_next(trigger=backward.ready[-1])

    def send_rest(self) -> None:
        """Send the remaining buckets at the end of a backward, with zeros for missing gradients."""
        backward = self.backward
        if backward.state is BackwardState.SENT:
            return
        if self.usage.static is not None:
            self.usage.static.learn()
        if backward.state is BackwardState.DEFERRED:
            backward.move(BackwardState.FILLING)
            backward.undefined = frozenset(backward.ready)  # no hook has looked for gradients
            for index in tuple(backward.ready):
                self._fill(index)
        backward.missing = self.missing()
        while backward.num_launched < len(self.layout.buckets):
            self._send_next(trigger=None)
        backward.move(BackwardState.SENT)

    def report_late(self, indices: Sequence[int]) -> None:
        """Report gradients that are in `.grad`, although no hook has reported them."""
        for index in indices:
            self.backward.ready.append(index)
            if self.backward.state is BackwardState.FILLING:
                self._fill(index)

    def missing(self) -> frozenset[int]:
        """Return the indices of the parameters that have no gradient to reduce in the present backward.

        If a parameter got none, but has one of an earlier backward under `no_sync`, this one is reported.

        Raises:
            SynclineError: a parameter got more than one gradient.
        """
        ready = self.backward.ready
        if self.unreduced and not self.options.allow_unused:
            older = sorted(self.unreduced.difference(ready))
            self.report_late([index for index in older if self.parameters[index].grad is not None])
        seen = set(ready)
        if len(seen) != len(ready):
            twice = [index for index, number in Counter(ready).items() if number > 1]
            raise self.out_of_step.twice(self.backward.step, twice)
        if self.options.allow_unused:  # hooks are also called for undefined gradients, which have no value
            seen = {index for index in seen if self.parameters[index].grad is not None}
        if len(seen) == len(self.parameters):
            return NO_INDICES
        return frozenset(range(len(self.parameters))) - seen

    def _fill(self, index: int) -> None:
        """Copy a ready gradient into its bucket, at the end of a backward in which hooks must not copy gradients."""
        bucket, view = self.layout.places[index]
        if view is not None:
            bucket.take(view, self.parameters[index].grad, self.backward.scale)
        bucket.num_pending -= 1
        if not bucket.num_pending:
            self.send_complete()

    def _send_next(self, *, trigger: int | None) -> None:
        """Send the next bucket in index order, unless the ranks have agreed that none of them uses its parameters.

        Args:
            trigger: index of the parameter whose gradient caused this call; None at the end of backward.
        """
        backward = self.backward
        bucket = self.layout.buckets[backward.num_launched]
        backward.num_launched += 1
        try:
            if self.usage.is_exchanged and self.usage.is_unused_by_all(bucket.plan.parameters):
                return
            missing = backward.missing
            with profiled("bucket {} fill", bucket.plan.index) if is_profiling() else UNPROFILED:
                empty = bucket.fill(backward.scale, missing and missing.intersection(bucket.plan.parameters))
            if empty and not backward.undefined.issuperset(empty):
                raise self.out_of_step.cleared(backward.step, sorted(set(empty) - backward.undefined))
            self.riders.look_at(bucket)
            tail = self._tail() if bucket.plan.tail_numel else None
            bucket.send(tail=tail, trigger=trigger)
        except Exception as error:
            self.out_of_step.add_place(error, backward.step, bucket.plan)
            raise
        backward.sent.append(bucket)
        if OBSERVERS.bucket_sent:
            self.state.ledger.bucket_sent(backward.step, bucket)

    def _tail(self) -> Tail:
        """Return the tail that this rank sends. It has no words if this rank has nothing to report."""
        used: list[int] = []
        if self.options.allow_unused:
            used = self.usage.uses(NO_INDICES, self.unreduced | set(self.backward.ready))
        words = self.riders.words(self.backward)
        form, rank = self.layout.form, self.transport.rank
        digits = form.encode(words, rank=rank, used=used) if used or any(words) else ()
        return Tail(digits, self.clock.note(), form.notes_at + rank * form.num_noted)

    # ------------------------------------------------------------------ at the end of backward

    def collect(self) -> int:
        """Wait for all buckets, set `.grad` to the result, and let the riders act on the result.

        Returns:
            The number of ranks or items by which the sums of the gradients are divided.
        """
        backward = self.backward
        divisor = backward.num_ranks
        if self.layout.message is not None:
            self._launch_message(self._tail())
        if backward.num_items is None and not self.options.allow_unused and not backward.missing:
            self._hand_out(divisor, in_turn=True)
            self._read_tail()
        else:  # the result depends on the tail
            for bucket in backward.sent:
                self._wait(bucket)
            self.usage.wait()
            self._read_tail()
            if backward.num_items is not None:
                divisor = self.state.normalizer.total(self.riders.items.of_ranks, step=backward.step)
            self._hand_out(divisor)
        with profiled("riders conclude") if is_profiling() else UNPROFILED:
            self._conclude(backward.sent)
        return divisor

    def _hand_out(self, divisor: int, *, in_turn: bool = False) -> None:
        """Divide the sums that are not yet divided, and set `.grad` to the result.

        Args:
            divisor: the number of ranks or items over which gradients are averaged.
            in_turn: whether to wait for each bucket just before it is handed out, while later buckets are reduced. If
                False, all buckets must already be reduced.
        """
        backward, comm_hook = self.backward, self.layout.comm_hook
        # Without items, gradients were scaled by 1/N before they were sent, or a user's hook divides them. A hook that
        # encodes gradients averages over all ranks.
        left = 1.0 if backward.num_items is None else divisor
        if comm_hook is not None and comm_hook.averages:
            left = divisor / self.transport.size
        skip, any_missing = NO_INDICES, bool(backward.missing)
        if any_missing:
            skip = frozenset(index for index, number in enumerate(self.usage.num_ranks_using) if not number)
        for bucket in backward.sent:
            if in_turn:
                self._wait(bucket)
            if left != 1:
                bucket.divide(left)
            with profiled("bucket {} to .grad", bucket.plan.index) if is_profiling() else UNPROFILED:
                bucket.hand_out(skip, any_missing=any_missing, keeps_tensor=backward.keeps_tensors)

    def _launch_message(self, tail: Tail) -> None:
        """Send the tail in a separate message, if no bucket carries the tail.

        If the message uses the same connection as a communication hook, it is sent only after all buckets were waited
        for. The hook may start collectives whenever one of its futures completes. The collective of the message must
        not start between collectives of the hook, because ranks must start all collectives in the same order.
        """
        if self.layout.message is not None:
            shares_connection = self.layout.comm_hook is not None and not self._has_own_connection
            self.layout.message.launch(tail, in_read=shares_connection)

    def _wait(self, bucket: Bucket) -> None:
        self.transport.board.bucket = bucket.plan.index
        try:
            bucket.wait()
        except Exception as error:
            self.out_of_step.add_place(error, self.backward.step, bucket.plan)
            raise
        if OBSERVERS.bucket_reduced:
            self.state.ledger.bucket_reduced(self.backward.step, bucket)

    def _read_tail(self) -> None:
        """Read the tail, and pass the words of all ranks to the riders. If a rider raises, it raises on every rank."""
        if self.layout.message is not None:
            tail = self.layout.message.read()
        else:
            last = self.layout.buckets[-1]
            assert isinstance(last, DenseBucket)
            tail = last.read_tail()
        rows: Sequence[Sequence[int] | None] = ()
        form = self.layout.form
        self.clock.heard = tail[form.notes_at : form.numel]
        if any(tail[: form.notes_at]) or self.options.allow_unused:
            rows, self.usage.num_ranks_using = form.decode(tail)
        with profiled("riders receive") if is_profiling() else UNPROFILED:
            self.riders.receive(rows, self.backward.step)

    def _conclude(self, buckets: Sequence[Bucket]) -> None:
        """Let the riders act on the result in `.grad`. If a rider raises, it raises on every rank."""
        comm_hook = self.layout.comm_hook
        averages = comm_hook is None or comm_hook.averages
        self.riders.conclude(
            Reduced(
                step=self.backward.step,
                buckets=buckets,
                # A mean of gradients scaled by 1/N overflows only if a rank's own gradient does. A sum, or the result
                # of a hook, may overflow even if no rank's own gradient does.
                can_overflow=comm_hook is not None or self.riders.items.any_counted,
                is_mean=averages and not self.options.sharded,
                any_nonfinite=self.riders.nonfinite.was_reported,
            )
        )

    def end_step(self, step: int) -> Measured | None:
        """End the present step, because a synchronized backward has ended. Warn of ranks that have become slow.

        Returns:
            The times of the step that has ended; None if it was the first step.
        """
        measured = self.clock.end_step()
        # A process does not wait for other ranks where a device does. Then its time of work includes such waits.
        if measured is not None and self.parameters[0].device.type == "cpu":
            stragglers = self.state.stragglers
            for slow in stragglers.add(measured.notes, step):
                if stragglers.rule.warns and self.transport.rank == 0:
                    warn_user(str(slow))
                if OBSERVERS.rank_found_slow:
                    self.state.ledger.rank_found_slow(slow)
        return measured

    # ------------------------------------------------------------------ without gradients to send

    def collect_alone(self) -> int:
        """Finish a backward without sending anything. Check and divide the gradients of this rank as in `collect`.

        Returns:
            The divisor of the gradients.
        """
        backward, riders, transport = self.backward, self.riders, self.transport
        backward.missing = self.missing()
        for rider in (riders.missing if backward.missing else None, riders.static_graph):
            if rider is not None:
                rider.check_alone(backward, rank=transport.rank, num_ranks=transport.size)
        divisor, policy = 1, self.options.on_nonfinite
        if backward.num_items is not None:
            divisor = self.state.normalizer.total([backward.num_items], step=backward.step)
            foreach_div_([p.grad for p in self.parameters if p.grad is not None], float(divisor))
        if self.usage.static is not None:
            self.usage.static.learn()
        if policy == "warn" or (policy != "ignore" and transport.size == 1):
            self.check_finite_alone(backward.step)
        riders.metrics.conclude_alone()
        return divisor

    def check_finite_alone(self, step: int) -> None:
        """Check `.grad` of the parameters for values that are not finite, because nothing is sent."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(self.parameters))
        self.riders.nonfinite.conclude_alone(gradients, step=step)

    def take_part_with_zeros(self, backward: Backward) -> None:
        """Send zeros in a synchronized backward of the other ranks, because this rank has no inputs left (`join`)."""
        self.backward = backward
        self._begin_step()
        num_tracked = len(self.parameters) if self.options.allow_unused else 0
        tail = Tail(self.layout.form.encode(None, rank=self.transport.rank, used=[0] * num_tracked))
        self.usage.exchange(NO_INDICES, NO_INDICES)
        for bucket in self.layout.buckets:
            if not self.usage.is_unused_by_all(bucket.plan.parameters):
                bucket.fill_zeros()
                bucket.send(tail=tail if bucket.plan.tail_numel else None, trigger=None)
                backward.sent.append(bucket)
        backward.move(BackwardState.SENT)
        self._launch_message(tail)
        for bucket in backward.sent:
            self._wait(bucket)
        self._read_tail()
        self._conclude(())
        if not self.layout.order_is_learnt:
            self.layout.learn_order(())


def _tensors_in_grad(parameters: Sequence[Tensor], layout: BucketLayout) -> Iterator[Tensor | None]:
    """Yield `.grad` of each parameter. If gradients are sharded, yield the stand-ins that replace `.grad`."""
    shards = layout.shards()
    for shard in shards:
        yield from shard.stand_ins
    if not shards:
        yield from (parameter.grad for parameter in parameters)
