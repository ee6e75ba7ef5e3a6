"""`sl.steps`: a training loop that goes on without the ranks that are lost.

[Note: the step as a transaction]

The body of a step runs forward and backward, and then the optimizer steps. It steps only after the gradients of all
ranks have arrived. So if a rank is lost before that moment, no rank has stepped: the others agree on who is left,
connect to each other anew, and run the body again.

A collective may end on one rank and fail on another. Then some ranks have stepped and others have not. Each rank counts
its *commits*: every step of an attached optimizer, and every end of a body. The ranks continue after the largest count.
A rank with a smaller count loads the state of a rank with the largest one. If the body is run again after an optimizer
has stepped in it, this step is not made again. So a body with several optimizers can be interrupted between them.

Samples count as used when an optimizer steps with them. If the body is run again after this, and no optimizer steps in
the second run, the samples of the second run come again.

[Note: shards]

With `sharded=True`, all ranks confirm that they are about to step, and then each rank steps its shard. If a rank is
lost after this, the step is made: a rank whose confirmation failed makes it when the ranks connect anew. Only the shard
of the lost rank may not have made it.

[Note: ranks at different steps]

Under strategies that let replicas drift, ranks make steps without a collective. So they can stop at different steps
when a rank is lost. They also count each sync that they have written (see `strategies/execution/standing.py`) as a
commit. A rank with a smaller count keeps its own parameters, and goes to the place of a rank with the largest one. Then
all of them sync, so that replicas are equal when training goes on. The rank that was lost takes no part in this sync.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from syncline.checkpoint.train_state import TrainState
from syncline.checks import checked_count, checked_flag, checked_kind, checked_seconds
from syncline.errors import PeerLost, SynclineError
from syncline.resilience.batches import Batches
from syncline.resilience.group import Group, is_loss
from syncline.resilience.handover import receive_state, send_state
from syncline.resilience.membership import Membership, Rules
from syncline.resilience.parts import (
    attached_in,
    conclude,
    load_sent,
    num_steps_of,
    rounds_in,
    sampler_in,
    state_to_send,
    wrappers_in,
)
from syncline.resilience.samples import Samples
from syncline.resilience.undo import Residuals, Undo
from syncline.session.world import transport_of, world
from syncline.sharded.optimizer import Sharding

_LOG = logging.getLogger("syncline")


class Step:
    """One step of `sl.steps`, as a context manager around its body."""

    def __init__(self, loop: _Loop, number: int) -> None:
        self.number = number
        """The number of this step; the first is 1."""
        self.attempt = 0
        """How often the body has begun; 1 in the first run. A body that prints or writes must look at this number."""
        self.discarded: list[str] = []
        """The reasons why earlier attempts were discarded."""
        self.is_committed = False
        """Whether the step stands. The other members have made it, too."""
        self.num_samples: int | None = None
        """The number of samples that this rank has used in this attempt; `next_batch` counts them."""
        self.loss: Exception | None = None
        """The error that has interrupted the last attempt; None if none has."""
        self._loop = loop

    def __repr__(self) -> str:
        return f"<step {self.number}, attempt {self.attempt}>"

    def next_batch(self) -> Any:
        """Return the next batch of the `data` that was given to `sl.steps`. Call it inside of the `with` block.

        At the end of an epoch, the next epoch begins. After the loss of a rank, the batches are those of this rank
        among the ranks that are left, and no sample that was used in a committed step comes again in this epoch.
        """
        batch, num_samples = self._loop.batches.take(self.num_samples or 0)
        if num_samples is not None:
            self.num_samples = (self.num_samples or 0) + num_samples
        return batch

    def __enter__(self) -> Step:
        if self.is_committed:
            raise SynclineError(f"step {self.number} was made already: use each step in one `with` block")
        self.attempt += 1
        self.num_samples, self.loss = None, None
        self._loop.begin_attempt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None:
            self._loop.commit(self.num_samples)
            self.is_committed = True
            return False
        if not is_loss(error):
            return False
        assert isinstance(error, Exception)
        self._loop.end_attempt(self.num_samples)
        self.loss = error
        return True


def steps(
    state: TrainState,
    until: int,
    *,
    data: Iterable[Any] | None = None,
    min_ranks: int = 1,
    needs_majority: bool = True,
    patience: float = 5.0,
) -> Iterator[Step]:
    """Run training steps until `state.step` is `until`, and go on without ranks that are lost.

    Call it on all ranks, after `sl.init`. The body of each step belongs into `with step:`. If a rank is lost, the body
    ends there, the other ranks agree on who is left, and the body runs again on these ranks, in the same processes.
    What the body has changed is undone: gradients, buffers, learning rates, scalers and random numbers. Parameters and
    the state of optimizers change only in `optimizer.step()`, which is not made twice.

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
        needs_majority: whether the ranks that train on must be more than half of those that have not certainly ended.
            Without it, two halves of a job that cannot reach each other could both train on.
        patience: the time in seconds for which the others wait for a rank that shows no sign of life.

    Yields:
        The next step; again the same step, if it was interrupted.

    Raises:
        TypeError, ValueError: an argument is invalid.
        PeerLost: too few ranks are left, or the launcher has ended.

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
    rules = Rules(
        min_ranks=checked_count("min_ranks", min_ranks, at_least=1),
        needs_majority=checked_flag("needs_majority", needs_majority),
        patience_seconds=checked_seconds("patience", patience),
    )
    return _Loop(state, checked_count("until", until, at_least=0), data, rules).run()


class _Loop:
    """One call of `sl.steps`."""

    def __init__(self, state: TrainState, until: int, data: Iterable[Any] | None, rules: Rules) -> None:
        self.state = state
        self.batches = Batches(data)
        self._until = until
        self._wrappers = wrappers_in(state)
        self._attached = attached_in(state, self._wrappers)
        self._undo = Undo(state.named)
        self._residuals = Residuals(self._wrappers)
        self._rounds = rounds_in(self._wrappers)
        self._samples = Samples(sampler_in(state), self._rounds)
        self._group = Group(rules)
        for rounds in self._rounds:
            rounds.standing.begin(self._group.someone_waits)
        for sharding in self._shardings:
            sharding.confirm()
        self._made: list[int] = []
        """The number of steps that each optimizer had made when the first attempt of this step began."""
        self._has_state = not self._group.joins
        self._num_made = 0
        """The number of steps of all optimizers when the last attempt began."""
        self._change_ms = 0.0
        """How long the last change of the ranks has taken."""

    def run(self) -> Iterator[Step]:
        """Yield the steps."""
        try:
            if self._group.joins:
                self._connect_to(self._group.join())
            while True:
                while self.state.step < self._until:
                    yield from self._one_step()
                lost = self._group.wait_for_all()
                if lost is None:
                    return
                self._connect_anew(lost)
        finally:
            self._group.leave()

    def _one_step(self) -> Iterator[Step]:
        if self._is_joined():
            self._made = self._steps_now()
            self._connect_anew(PeerLost("this rank stops, because a process joins"))
            self._say(self.state.step + 1, "continue")
        step = Step(self, self.state.step + 1)
        while not step.is_committed:
            attempt = step.attempt
            yield step
            if step.attempt == attempt:
                raise SynclineError(
                    f"step {step.number}: expected its body in `with step:`, which was not entered"
                )
            if step.loss is not None:
                self._undo.restore()
                self._connect_anew(step.loss)
                step.discarded.append(self._group.change)
                if self.state.step >= step.number:  # this rank was behind, and has loaded the end of the step
                    return
                self._say(step.number, "repeat the step")

    def _is_joined(self) -> bool:
        """Return whether this rank must stop, because a process joins."""
        at_syncs = [rounds.standing for rounds in self._rounds if rounds.meets_at_syncs]
        if at_syncs:  # all ranks have heard of the process in the same sync, and stop after the same step
            return any(standing.someone_waits for standing in at_syncs)
        return self._group.someone_waits()

    def _say(self, number: int, what: str) -> None:
        if world().rank == 0:
            _LOG.warning(
                "syncline: step %d: %s; the ranks, now %d, %s (after %.0f ms)",
                number, self._group.change, world().size, what, self._change_ms,
            )  # fmt: skip

    def begin_attempt(self) -> None:
        """Remember what the body finds."""
        self._undo.begin()
        self._residuals.begin()
        if not any(attached.num_made_before for attached in self._attached):
            self._made = [attached.num_steps for attached in self._attached]
        self._num_made = self._num_steps

    def end_attempt(self, num_samples: int | None) -> None:
        """Count the samples of an interrupted attempt, if an optimizer has stepped with them."""
        self._residuals.end()
        sampler = self._samples.sampler
        if sampler is not None and num_samples and self._num_steps > self._num_made:
            sampler.advance(num_samples)
            self._samples.note()

    def commit(self, num_samples: int | None) -> None:
        """Let the step stand."""
        was_made_before = any(now > before for now, before in zip(self._steps_now(), self._made, strict=True))
        if was_made_before and self._num_steps == self._num_made:
            self._residuals.end()
            if self._samples.sampler is None:
                self.state.commit(num_samples)
            else:
                self.state.commit(0)
                self._deal()
        else:
            self.state.commit(num_samples)
            self._samples.note()
        for attached in self._attached:
            attached.num_made_before = 0

    def _steps_now(self) -> list[int]:
        """Return the number of steps that each optimizer has made."""
        return [num_steps_of(attached) for attached in self._attached]

    @property
    def _num_steps(self) -> int:
        return sum(self._steps_now())

    @property
    def _num_commits(self) -> int:
        num_syncs = sum(rounds.standing.num_written for rounds in self._rounds)
        num_moves = sum(sharding.num_moves for sharding in self._shardings)
        return self.state.step + self._num_steps + num_syncs + num_moves if self._has_state else -1

    # ------------------------------------------------------------------ a rank is lost, or joins

    def _connect_anew(self, loss: Exception) -> None:
        """Go on with the ranks that are left, and with those that join."""
        began = time.monotonic()
        for wrapper in self._wrappers:
            wrapper._replica.abort_groups(f"it stops, because it has noticed a loss: {loss}")
        self._connect_to(self._group.agree(self._num_commits, loss))
        self._change_ms = 1000 * (time.monotonic() - began)

    def _connect_to(self, membership: Membership) -> None:
        while True:
            try:
                self._group.connect(membership)
                self._follow(membership)
                return
            except Exception as error:
                if not is_loss(error):
                    raise
                loss = error
            membership = self._group.agree(self._num_commits, loss)

    def _follow(self, membership: Membership) -> None:
        """Let the objects of the training state follow the new membership."""
        here = world()
        transport = transport_of(None)
        sources = [membership.members.index(name) for name in membership.sources]
        behind = [rank for rank in range(here.size) if rank not in sources]
        for rounds in self._rounds:
            rounds.standing.conclude(is_written=here.rank in behind)
        for attached in self._attached:
            conclude(attached, is_made=here.rank in behind)
        if here.rank in behind:
            self._settle_shards()
        for wrapper in self._wrappers:
            wrapper._replica.use_transport(transport)
        is_new, loads = not self._has_state, False
        if here.rank == sources[0]:
            send_state(self._state(), transport, behind)
        elif here.rank in behind:
            sent = receive_state(transport, sources[0])
            loads = is_new or len(self._rounds) < len(self._wrappers) or self._is_synchronous
            self._load(sent, values=loads)
            self._has_state = True
        for wrapper in self._wrappers:
            wrapper._replica.gradients.count_from_step(self.state.step)
        if self._rounds:
            self._samples.meet(transport, is_new=is_new, has_loaded=loads)
            for rounds in self._rounds:
                rounds.settle()
            self._samples.deal_after_meeting(transport)
            self.batches.begin_again()
        else:
            self._deal()
        for attached, made in zip(self._attached, self._made, strict=True):
            attached.num_made_before = attached.num_steps - made
        transport.barrier().wait()
        self._settle_shards()

    @property
    def _shardings(self) -> list[Sharding]:
        found = [wrapper._replica.sharding for wrapper in self._wrappers]
        return [sharding for sharding in found if sharding is not None]

    def _settle_shards(self) -> None:
        for sharding in self._shardings:
            sharding.settle()

    @property
    def _is_synchronous(self) -> bool:
        return any(rounds.is_synchronous for rounds in self._rounds)

    def _deal(self) -> None:
        """Deal the samples that are left to the present ranks, and begin a new iteration."""
        here = world()
        self._samples.deal(here.size, here.rank)
        self.batches.begin_again()

    def _state(self) -> dict[str, Any]:
        return {
            "state": state_to_send(self.state),
            "num_steps": self._steps_now(),
            "made": self._made,
            "places": [rounds.place() for rounds in self._rounds],
        }

    def _load(self, sent: dict[str, Any], *, values: bool) -> None:
        """Load the state of another rank.

        Args:
            sent: what `_state` returned there.
            values: whether to load the values of modules and optimizers, too.
        """
        load_sent(self.state, sent["state"], values=values, own=self._has_state)
        for rounds, place in zip(self._rounds, sent["places"], strict=True):
            rounds.go_to(place)
        self._made = sent["made"]
        for attached, number in zip(self._attached, sent["num_steps"], strict=True):
            attached.num_steps = number
