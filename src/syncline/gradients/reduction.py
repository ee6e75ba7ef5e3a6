"""The way of the gradients of one backward: into buckets, over the transport, and back into `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from syncline.gradients.backward import NO_INDICES, Backward, BackwardState
from syncline.gradients.bucket import Bucket, copy_scaled
from syncline.gradients.layout import BucketLayout
from syncline.gradients.options import GradientOptions
from syncline.gradients.out_of_step import OutOfStep
from syncline.gradients.riders.base import Reduced
from syncline.gradients.riders.items import ItemNormalizer
from syncline.gradients.riders.roster import Roster
from syncline.gradients.sparse import SparseBucket
from syncline.gradients.usage import Usage
from syncline.transport.base import Transport


class Reduction:
    """Sends the buckets of a backward in index order, waits for them, and hands out the result.

    The cost is the number of Python calls: one per parameter, a few per bucket. So work is done per bucket wherever it
    need not be done per parameter.

    Args:
        named_parameters: the parameters that require grad, each once, the same on all ranks.
        transport: the transport that reduces the buckets.
        options: the options of gradient synchronization.
        has_own_connection: whether `transport` is used for nothing else, not even for collectives that a communication
            hook starts.
        former: the object whose state is taken over, because the module or its group has changed.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        options: GradientOptions,
        *,
        has_own_connection: bool,
        former: Reduction | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.transport = transport
        self.options = options
        self.layout = BucketLayout(named_parameters, transport, options)
        self.usage = Usage(self.parameters, transport, options)
        self.riders: Roster = Roster(
            self.names,
            transport,
            options,
            static=self.usage.static,
            gradients=partial(_tensors_in_grad, self.parameters, self.layout),  # no cycle of references
            former=None if former is None else former.riders,
        )
        self.layout.reserve_tail(self.riders.widths)
        self.normalizer: ItemNormalizer
        if former is None:
            self.normalizer = ItemNormalizer(self.parameters, transport.size)
            self.out_of_step = OutOfStep(transport.rank, self.names)
        else:
            # A block of normalize_by may have begun before the module changed.
            self.normalizer = former.normalizer
            self.normalizer.follow(self.parameters, transport.size)
            self.out_of_step = OutOfStep(transport.rank, self.names, text=former.out_of_step.text)
        self._has_own_connection = has_own_connection
        comm_hook = None if former is None else former.layout.comm_hook
        if transport.size > 1 or comm_hook is not None:
            self.layout.build(comm_hook)

    @property
    def sends(self) -> bool:
        """Whether there is anything to reduce with, other ranks or a communication hook."""
        return self.transport.size > 1 or self.layout.comm_hook is not None

    # ------------------------------------------------------------------ during backward

    def begin(self, backward: Backward) -> None:
        """Prepare the buckets and the riders, and find the parameters that the backward will not reach."""
        usage = self.usage
        if usage.static is not None:
            usage.static.reset()
        if not backward.is_synchronized:
            return
        self._reset(backward.step)
        if usage.reads_graph and backward.context_id is None:
            backward.absent = usage.absent()
            for index in backward.absent:  # their buckets do not wait for them
                self.layout.places[index][0].num_pending -= 1
        if usage.is_exchanged:
            usage.exchange(set(range(len(self.parameters))) - backward.absent, backward.unreduced)

    def _reset(self, step: int) -> None:
        self.transport.board.step = step
        self.transport.board.phase = "backward"
        for bucket in self.layout.buckets:
            bucket.reset()
        self.riders.begin_step(step)

    def send_complete(self, backward: Backward) -> None:
        """Send, in index order, every bucket that is complete."""
        buckets = self.layout.buckets
        while backward.num_launched < len(buckets):
            bucket = buckets[backward.num_launched]
            if bucket.num_pending or (self.usage.static is not None and bucket.plan.tail_numel):
                return  # the last bucket reports if a static graph has changed, which is known only at the end
            absent = backward.absent
            missing = absent.intersection(bucket.plan.parameters) if absent else NO_INDICES
            self._send_next(backward, trigger=backward.ready[-1], missing=missing)

    def send_rest(self, backward: Backward) -> None:
        """Send the remaining buckets at the end of a backward, with zeros for missing gradients."""
        if backward.state is BackwardState.SENT:
            return
        if self.usage.static is not None:
            self.usage.static.learn()
        if backward.state is BackwardState.DEFERRED:
            backward.move(BackwardState.FILLING)
            for index in tuple(backward.ready):
                self._fill(backward, index)
        backward.missing = self.missing(backward)
        while backward.num_launched < len(self.layout.buckets):
            self._send_next(backward, trigger=None, missing=backward.missing)
        backward.move(BackwardState.SENT)

    def missing(self, backward: Backward) -> frozenset[int]:
        """Return the indices of the parameters that got no gradient.

        Raises:
            SynclineError: a parameter got more than one.
        """
        ready = backward.ready
        seen = set(ready)
        if len(seen) != len(ready):
            twice = [index for index in seen if ready.count(index) > 1]
            raise self.out_of_step.twice(backward.step, twice)
        if self.options.allow_unused:  # the hook of an undefined gradient is called, but there is no value
            seen = {index for index in seen if self.parameters[index].grad is not None}
        if len(seen) == len(self.parameters):
            return NO_INDICES
        return frozenset(range(len(self.parameters))) - seen

    def _fill(self, backward: Backward, index: int) -> None:
        """Put a ready gradient into its bucket, as a hook does, if its hook could not do so."""
        bucket, view = self.layout.places[index]
        if view is not None:
            copy_scaled(view, self.parameters[index].grad, backward.scale)
        bucket.num_pending -= 1
        if not bucket.num_pending:
            self.send_complete(backward)

    def _send_next(self, backward: Backward, *, trigger: int | None, missing: frozenset[int]) -> None:
        bucket = self.layout.buckets[backward.num_launched]
        backward.num_launched += 1
        try:
            if self.usage.is_exchanged and self.usage.is_unused_by_all(bucket.plan.parameters):
                return
            bucket.fill(backward.scale, missing)
            self.riders.look_at(bucket)
            tail = self._tail(backward) if bucket.plan.tail_numel else None
            bucket.send(tail=tail, trigger=trigger)
        except Exception as error:
            self.out_of_step.add_place(error, backward.step, bucket.plan)
            raise
        backward.sent.append(bucket)

    def _tail(self, backward: Backward) -> list[int]:
        """Return this rank's part of the tail; an empty list if there is nothing to report, as in almost every step."""
        used: list[int] = []
        if self.options.allow_unused:
            used = self.usage.uses(NO_INDICES, backward.unreduced | set(backward.ready))
        words = self.riders.words(backward)
        if not used and not any(words):
            return []
        return self.layout.form.encode(words, rank=self.transport.rank, used=used)

    # ------------------------------------------------------------------ at the end of backward

    def collect(self, backward: Backward, *, keeps_tensors: bool) -> int:
        """Wait for all buckets, set `.grad` to the result, and let the riders conclude; return the divisor of the sums.

        Args:
            backward: the backward, all of whose buckets are sent.
            keeps_tensors: whether `.grad` must stay the same tensor, see `Bucket.hand_out`.
        """
        tail = partial(self._tail, backward)
        self._send_message(tail, are_reduced=False)
        if backward.num_items is None and not self.options.allow_unused and not backward.missing:
            divisor = self._hand_out_in_turn(backward, tail, keeps_tensors=keeps_tensors)
        else:
            divisor = self._hand_out_at_once(backward, tail, keeps_tensors=keeps_tensors)
        self._conclude(backward.sent, backward.step)
        return divisor

    def _hand_out_in_turn(
        self, backward: Backward, tail: Callable[[], list[int]], *, keeps_tensors: bool
    ) -> int:
        """Hand out each bucket while later ones are still being reduced: the common case."""
        divisor = backward.num_ranks
        left = 1.0 if self.layout.comm_hook is None else self._left_to_divide(backward, divisor)
        for bucket in backward.sent:
            self._wait(bucket, backward.step)
            if left != 1:
                bucket.divide(left)
            bucket.hand_out(NO_INDICES, any_missing=False, keeps_tensor=keeps_tensors)
        self._send_message(tail, are_reduced=True)
        self._read_tail(backward.step)
        return divisor

    def _hand_out_at_once(
        self, backward: Backward, tail: Callable[[], list[int]], *, keeps_tensors: bool
    ) -> int:
        """Hand out all buckets once the tail has been read, because the result depends on it."""
        for bucket in backward.sent:
            self._wait(bucket, backward.step)
        self.usage.wait()
        self._send_message(tail, are_reduced=True)
        self._read_tail(backward.step)
        divisor = backward.num_ranks
        if backward.num_items is not None:
            divisor = self.normalizer.total(self.riders.items.of_ranks, step=backward.step)
        left = self._left_to_divide(backward, divisor)
        if left != 1:
            for bucket in backward.sent:
                bucket.divide(left)
        any_missing, used = bool(backward.missing), self.usage.num_ranks_using
        skip = (
            frozenset(i for i, num_ranks in enumerate(used) if not num_ranks) if any_missing else NO_INDICES
        )
        for bucket in backward.sent:
            bucket.hand_out(skip, any_missing=any_missing, keeps_tensor=keeps_tensors)
        return divisor

    def _left_to_divide(self, backward: Backward, divisor: int) -> float:
        """Return the divisor that is still to be applied to the result of the reduction.

        A user's hook has already divided. A hook that encodes gradients has averaged over all ranks.
        """
        comm_hook = self.layout.comm_hook
        if comm_hook is not None and comm_hook.averages:
            return divisor / self.transport.size
        return 1.0 if backward.num_items is None else divisor

    def _send_message(self, tail: Callable[[], list[int]], *, are_reduced: bool) -> None:
        """Send the tail if no bucket carries it, either before or after the buckets are waited for.

        Sending it before lets everything travel at once. It is sent after if it shards a connection with a
        communication hook: the hook may start its own collectives whenever one of its futures completes, and the
        tail's collective would get between them.

        Args:
            tail: returns the tail to send.
            are_reduced: whether this call comes after the buckets were waited for.
        """
        message = self.layout.message
        must_be_last = self.layout.comm_hook is not None and not self._has_own_connection
        if message is not None and are_reduced == must_be_last:
            message.launch(tail())

    def _wait(self, bucket: Bucket | SparseBucket, step: int) -> None:
        self.transport.board.bucket = bucket.plan.index
        try:
            bucket.wait()
        except Exception as error:
            self.out_of_step.add_place(error, step, bucket.plan)
            raise

    def _read_tail(self, step: int) -> None:
        """Read the tail, and give the riders the words of all ranks. If a rider raises, it raises on every rank."""
        if self.layout.message is not None:
            tail = self.layout.message.read()
        else:
            last = self.layout.buckets[-1]
            assert isinstance(last, Bucket)
            tail = last.read_tail()
        rows: Sequence[Sequence[int] | None] = ()
        if any(tail) or self.options.allow_unused:
            rows, self.usage.num_ranks_using = self.layout.form.decode(tail)
        self.riders.receive(rows, step)

    def _conclude(self, buckets: Sequence[Bucket | SparseBucket], step: int) -> None:
        """Let the riders act on the result in `.grad`. If a rider raises, it raises on every rank."""
        comm_hook = self.layout.comm_hook
        averages = comm_hook is None or comm_hook.averages
        self.riders.conclude(
            Reduced(
                step=step,
                buckets=buckets,
                # A mean of gradients scaled by 1/N overflows only if a rank's own gradient does. A sum, or the result
                # of a hook, may overflow without that.
                can_overflow=comm_hook is not None or self.riders.items.any_counted,
                is_mean=averages and not self.options.sharded,
                any_nonfinite=self.riders.nonfinite.was_reported,
            )
        )

    def take_part_with_zeros(self, backward: Backward) -> None:
        """Match a synchronized backward of the other ranks, because this rank has no inputs left (`join`)."""
        self._reset(backward.step)
        num_tracked = len(self.parameters) if self.options.allow_unused else 0
        tail = self.layout.form.encode(None, rank=self.transport.rank, used=[0] * num_tracked)
        self.usage.exchange(NO_INDICES, NO_INDICES)
        for bucket in self.layout.buckets:
            if self.usage.is_unused_by_all(bucket.plan.parameters):
                continue
            bucket.launch_zeros(tail=tail if bucket.plan.tail_numel else None)
            backward.sent.append(bucket)
        backward.move(BackwardState.SENT)
        self._send_message(lambda: tail, are_reduced=False)
        for bucket in backward.sent:
            self._wait(bucket, backward.step)
        self._send_message(lambda: tail, are_reduced=True)
        self._read_tail(backward.step)
        self._conclude((), backward.step)
        if not self.layout.order_is_learnt:
            self.layout.learn_order(())


def _tensors_in_grad(parameters: Sequence[Tensor], layout: BucketLayout) -> Iterator[Tensor | None]:
    """Yield the `.grad` of each parameter; with shards, the stand-ins that represent them."""
    shards = layout.shards()
    for shard in shards:
        yield from shard.stand_ins
    if not shards:
        yield from (parameter.grad for parameter in parameters)
