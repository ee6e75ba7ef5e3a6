"""`sl.steps`: a training loop that continues without the ranks that are lost.

[Note: the step as a transaction]

The body of a step runs forward and backward, and then the optimizer steps. It steps only after the gradients of all
ranks have arrived. So if a rank is lost before that moment, no rank has stepped: the others agree on a membership,
connect to each other anew, and run the body again.

A collective may end on one rank and fail on another. Then some ranks have stepped and others have not. Each rank counts
its *commits*: every step of an attached optimizer, and every end of a body. The ranks continue after the largest count.
A rank with a smaller count loads the state of a rank with the largest one. If the body is run again after an optimizer
has stepped in it, the optimizer does not step again. So a body with several optimizers can be interrupted between them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count, checked_flag, checked_kind, checked_seconds, suggests_arguments
from syncline.errors import PeerLost, SynclineError
from syncline.events import OBSERVERS, RanksChanged, emit
from syncline.records import StragglerRecord
from syncline.resilience.batches import Batches
from syncline.resilience.faults import Fault
from syncline.resilience.group import Group
from syncline.resilience.membership import Membership, Rules
from syncline.resilience.parts import (
    attached_in,
    refuse_drift,
    refuse_sharded_with_spares,
    sampler_in,
    wrappers_in,
)
from syncline.resilience.slow_ranks import SlowRanks
from syncline.resilience.training import Training
from syncline.session.world import world

_LOG = logging.getLogger("syncline")


class Step:
    """One step of `sl.steps`, as a context manager around its body."""

    def __init__(self, loop: _Loop, number: int) -> None:
        self.number = number
        """The number of this step; the first is 1."""
        self.attempt = 0
        """The number of this run of the body; the first is 1. A body that prints or writes files has to check it."""
        self.discarded: list[str] = []
        """The reasons why earlier attempts were discarded."""
        self.is_committed = False
        """Whether the step is committed. Unless replicas drift, the other members have made it, too."""
        self.num_samples: int | None = None
        """The number of samples that this rank has used in this attempt; `next_batch` counts them."""
        self.loss: Exception | None = None
        """The error that has interrupted the last attempt; None if none has."""
        self._loop = loop
        self._fault: Fault | None = None
        """The error that has interrupted the last attempt, in comparable form."""
        self._around_batch: contextlib.ExitStack | None = None
        """The contexts around the batch that `batches` has yielded last. An error in the body leaves them open."""

    def __repr__(self) -> str:
        return f"<step {self.number}, attempt {self.attempt}>"

    def next_batch(self) -> Any:
        """Return the next batch of the `data` that was given to `sl.steps`. Call it inside of the `with` block.

        At the end of an epoch, the next epoch begins. After the loss of a rank, the unused samples are divided
        among the remaining ranks, and no sample that was used in a committed step comes again in this epoch.
        """
        if self._loop.keeps_global_batch:
            raise SynclineError(
                f"step {self.number}: with keep_global_batch=True a step can have several batches: write "
                "`for batch in step.batches()` instead of next_batch()"
            )
        return self._take()

    def batches(self, *, are_means: bool = True) -> Iterator[Any]:
        """Yield the batches of this rank in this step: one, or several under `keep_global_batch=True`.

        Run forward and backward of each batch inside of the loop, and the optimizer's step after it. The gradients of
        all batches but the last are accumulated locally (`no_sync`), and then the mean over all batches of all ranks is
        taken. The batches are those of all ranks with which the training began, also after ranks were lost.

        Args:
            are_means: whether the loss is a mean over the batch, as usual. Pass False if it is a sum, and use
                `ddp.normalize_by` in the loop.
        """
        wrappers, number = self._loop.wrappers, self._loop.batches.num_each_step
        around = self._around_batch = contextlib.ExitStack()
        divides = self._loop.batches_differ and are_means
        for at in range(number):
            for wrapper in wrappers:
                if at < number - 1:
                    around.enter_context(wrapper.no_sync())
                if divides:  # ranks have unequal numbers of batches: the mean of their means would be wrong
                    around.enter_context(wrapper.normalize_by(1))
            yield self._take()
            around.close()

    def _take(self) -> Any:
        batch, num_samples = self._loop.batches.take(self.num_samples or 0)
        if num_samples is not None:
            self.num_samples = (self.num_samples or 0) + num_samples
        return batch

    def __enter__(self) -> Step:
        if self.is_committed:
            raise SynclineError(f"step {self.number} was made already: use each step in one `with` block")
        self.attempt += 1
        self.num_samples, self.loss = None, None
        self._loop.training.begin_attempt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if self._around_batch is not None:
            self._around_batch.close()
        if error is None:
            self._loop.training.commit(self.num_samples)
            self.is_committed = True
            return False
        if not self._is_loss(error):
            self._loop.end_by_fault(self.number, error)
            return False
        assert isinstance(error, Exception)
        self._loop.training.end_attempt(self.num_samples)
        self.loss = error
        return True

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether the body is run again after this error.

        Errors of a backend are recognized only by their text, so an error of the program can be mistaken for one. An
        error of the program comes again in the next attempt, from the same line.
        """
        before, self._fault = self._fault, Fault.of(error)
        is_again = isinstance(error, RuntimeError) and not isinstance(error, SynclineError)
        return not (is_again and self._fault == before) and self._loop.is_loss(error)


@suggests_arguments
def steps(
    state: TrainState,
    until: int,
    *,
    data: Iterable[Any] | None = None,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    keep_global_batch: bool = False,
    needs_majority: bool = True,
    patience: float = 5.0,
    on_straggler: Literal["warn", "evict"] | None = "warn",
    straggler_factor: float = 2.0,
    straggler_steps: int = 50,
) -> Iterator[Step]:
    """Run training steps until `state.step` is `until`, and continue without ranks that are lost.

    Call it on all ranks, after `sl.init`. The body of each step belongs inside `with step:`. If a rank is lost, the
    body ends there, the other ranks agree on a membership, and the body runs again on these ranks, in the same
    processes. Changes by the body are undone: gradients, buffers, learning rates, scalers and random numbers.
    Parameters and the state of optimizers change only in `optimizer.step()`, which is not made twice.

    The end of the `with` block calls `state.commit`. Do not call it yourself.

    The ranks and their number change when a rank is lost: read them from `sl.world()`, each time.

    Start the job with `syncline run --resilient`, because other launchers end all ranks when one has ended.

    Args:
        state: the training state: a module that is wrapped by `sl.DistributedDataParallel`, its optimizers, schedulers,
            GradScaler and sampler. Optimizers of the module are attached to it.
        until: the number of steps at which the loop ends.
        data: the batches of this rank, such as a DataLoader, for `step.next_batch()`. Give its `DistributedSampler`
            to `state`, so that the samples of lost ranks are dealt to the others.
        min_ranks: the smallest number of ranks that train on.
        max_ranks: the largest number of ranks that train. None stands for the number at the beginning. Ranks above it
            are spare: they wait in this call, and join as soon as a rank is lost.
        keep_global_batch: whether each step uses as many batches as the training began with, also after ranks were
            lost. The remaining ranks then accumulate gradients over several batches (`step.batches`). Otherwise the
            global batch becomes smaller.
        needs_majority: whether the ranks that train on must be more than half of those that have not certainly ended.
            Without it, two halves of a job that cannot reach each other could both train on.
        patience: the time in seconds for which the others wait for a rank that shows no sign of life.
        on_straggler: the reaction to a rank that works much longer than the others, so that all wait for it. "warn":
            rank 0 warns, with the phase in which this rank loses the time. "evict": rank 0 warns, and the others train
            on without this rank, if they are at least `min_ranks`. None: nothing. `ddp.statistics()` records it anyway.
        straggler_factor: a straggler works at least this many times as long as the median of the ranks, above 1, and at
            least 5 ms a step longer. Above a factor of 2, training is faster without the straggler, with any number of
            ranks.
        straggler_steps: the number of steps, at least 5, over which a straggler is slow (in each fifth of them).

    Yields:
        The next step; again the same step, if it was interrupted.

    Raises:
        TypeError, ValueError: an argument is invalid. Or `keep_global_batch` is True, and replicas drift under a
            strategy. Or ranks are spare, and a module is sharded.
        PeerLost: too few ranks are left, or the launcher has ended, or this rank was slow and was left behind.
        SystemExit: this process was a spare or a replacement, and the other ranks have ended without it.

    Examples:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> state = sl.TrainState(model=ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))
        >>> for step in sl.steps(state, until=3):
        ...     with step:
        ...         state.named["optimizer"].zero_grad()
        ...         ddp(torch.ones(4, 2)).square().mean().backward()
        ...         state.named["optimizer"].step()
        >>> state.step
        3
    """
    checked_kind("state", state, TrainState, "an sl.TrainState")
    slow = SlowRanks(
        on_straggler, straggler_factor, straggler_steps, checked_count("min_ranks", min_ranks, at_least=1)
    )
    rules = Rules(
        min_ranks=min_ranks,
        max_ranks=0 if max_ranks is None else checked_count("max_ranks", max_ranks, at_least=min_ranks),
        needs_majority=checked_flag("needs_majority", needs_majority),
        patience_seconds=checked_seconds("patience", patience),
    )
    keeps = checked_flag("keep_global_batch", keep_global_batch)
    until = checked_count("until", until, at_least=0)
    return _Loop(state, until, data, rules, slow, keeps_global_batch=keeps).run()


class _Loop:
    """One call of `sl.steps`."""

    def __init__(
        self,
        state: TrainState,
        until: int,
        data: Iterable[Any] | None,
        rules: Rules,
        slow: SlowRanks,
        *,
        keeps_global_batch: bool,
    ) -> None:
        self.wrappers = wrappers_in(state)
        self.keeps_global_batch = keeps_global_batch
        if keeps_global_batch:
            refuse_drift(self.wrappers)
        self._until = until
        if 0 < rules.max_ranks < world().size:
            refuse_sharded_with_spares(self.wrappers)
        attached, sampler = attached_in(state, self.wrappers), sampler_in(state)
        self._group = Group(rules)
        self._num_places = self._group.first_size
        if keeps_global_batch and rules.max_ranks > self._num_places:
            raise ValueError(
                f"keep_global_batch=True expects max_ranks to be at most {self._num_places}, the number of ranks at "
                f"the beginning, got {rules.max_ranks}: there would be ranks without a batch"
            )
        self.batches = Batches(data, sampler, self._num_places if keeps_global_batch else None)
        self.training = Training(
            state,
            self.wrappers,
            attached,
            sampler,
            self.batches,
            has_state=not self._group.joins,
        )
        self._slow = slow
        slow.watch(self.wrappers)
        self._change = (0.0, 0.0)
        """The times at which the last change of the ranks began and ended."""

    @property
    def batches_differ(self) -> bool:
        """Whether a rank uses more than one batch in a step, so that the numbers of the ranks can differ."""
        return self.keeps_global_batch and world().size < self._num_places

    def run(self) -> Iterator[Step]:
        """Yield the steps."""
        training, is_closed = self.training, False
        try:
            training.look_for_newcomers(self._group.someone_waits)
            begin = self._group.begin()
            if begin is not None:
                self._connect_to(begin)
            while True:
                while training.state.step < self._until:
                    yield from self._one_step()
                lost = self._group.wait_for_all()
                if lost is None:
                    return
                self._connect_anew(lost)
        except GeneratorExit:
            is_closed = True
            raise
        finally:
            training.look_for_newcomers(None)
            self._slow.end()
            self._group.leave(is_closed=is_closed)

    def _one_step(self) -> Iterator[Step]:
        slow = self._slow.to_leave_behind()
        # If ranks have unequal numbers of batches, a rank with more of them is no straggler.
        if slow is not None and not self.batches_differ:
            self._leave_behind(slow)
        self._let_newcomers_in()
        step = Step(self, self.training.state.step + 1)
        while not step.is_committed:
            attempt = step.attempt
            yield step
            if step.attempt == attempt:
                raise SynclineError(
                    f"step {step.number}: expected its body in `with step:`, which was not entered"
                )
            if step.loss is not None:
                self.training.undo()
                self._connect_anew(step.loss)
                self._group.check_faults(step.number, step.loss)
                step.discarded.append(self._group.change)
                # This rank may have been behind, and have loaded a state in which the step is complete.
                if self.training.state.step >= step.number:
                    return
                self._say(step.number, "repeat the step")

    def _leave_behind(self, slow: StragglerRecord) -> None:
        """Continue without a slow rank. All ranks make this call before the same step."""
        self.training.end_step()
        num_ranks = world().size
        # The slow rank must not disconnect while another one is in its last step.
        loss = self._group.wait_for_all()
        if loss is None and slow.rank == world().rank:
            self._group.stay_behind(f'the others train on without it, because on_straggler="evict": {slow}')
        self._connect_anew(loss or PeerLost(str(slow)))
        if loss is None:
            self._group.change = f"rank {slow.rank} of {num_ranks} was slow and is left behind"
        self._say(self.training.state.step + 1, "continue")

    def _let_newcomers_in(self) -> None:
        """Continue together with processes that want to join, if there are any."""
        loss: Exception | None = None
        if world().size == 1:  # a single rank sends no gradients that could carry the report
            someone_waits = self.training.newcomers_wait() or self._group.someone_waits()
        elif self.training.ranks_meet:
            someone_waits = self.training.newcomers_wait()  # the same on all ranks
        else:
            someone_waits = self._group.someone_waits()
            loss = PeerLost("this rank stops, because a process joins")
        if not someone_waits:
            return
        if loss is None:
            loss = self._group.wait_for_all()  # no rank may disconnect while another one is in its step
        self.training.end_step()
        self._connect_anew(loss)
        self._say(self.training.state.step + 1, "continue")

    def _say(self, number: int, what: str) -> None:
        here, (began_at, ended_at) = world(), self._change
        if OBSERVERS.ranks_changed:
            change, num_lost = self._group.change, self._group.num_lost
            event = RanksChanged(here.rank, here.size, number, change, began_at, ended_at, num_lost)
            emit(OBSERVERS.ranks_changed, event)
        if here.rank == 0:
            _LOG.warning(
                "syncline: step %d: %s; the ranks, now %d, %s (after %.0f ms)",
                number, self._group.change, here.size, what, 1000 * (ended_at - began_at),
            )  # fmt: skip

    def is_loss(self, error: BaseException) -> bool:
        """Return whether the body is run again after this error."""
        return self._group.is_loss(error)

    def end_by_fault(self, step: int, error: BaseException) -> None:
        """Record that an exception ends this process in a step."""
        self._group.end_by_fault(step, error)

    def _connect_anew(self, loss: Exception | None) -> None:
        """Connect to the remaining ranks, and to processes that join."""
        began_at = time.perf_counter()
        if loss is not None:
            for wrapper in self.wrappers:
                wrapper._replica.abort_groups(f"it stops, because it has noticed a loss: {loss}")
        self._connect_to(self._group.agree(self.training.num_commits, loss))
        self._change = began_at, time.perf_counter()

    def _connect_to(self, membership: Membership) -> None:
        while True:
            try:
                self._group.connect(membership)
                self.training.follow(membership)
                self._group.settle()
                return
            except Exception as error:
                if not self.is_loss(error):
                    raise
                loss = error
            membership = self._group.agree(self.training.num_commits, loss)
