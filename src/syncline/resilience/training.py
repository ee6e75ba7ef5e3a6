"""One training state in `sl.steps`: it counts commits, and adapts its objects to a new membership.

[Note: ranks at different steps]

Under strategies that let replicas drift, ranks make steps without a collective. So they can stop at different steps
when a rank is lost. They also count each sync that they have written (see `strategies/execution/standing.py`) as a
commit. A rank with a smaller count keeps its own parameters, and takes over the step counts of a rank with the largest
one. Then the remaining ranks sync, so that replicas are equal when training continues.

[Note: shards]

With `sharded=True`, all ranks confirm that they are about to step, and then each rank steps its shard. If a rank is
lost after this, the step is still made: a rank whose confirmation failed makes it when the ranks connect anew. Only the
shard of the lost rank may lack it.

Samples count as used when an optimizer steps with them. If the body is run again after this, and no optimizer steps in
the second run, the samples of the second run come again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from syncline.checkpoint.train_state import TrainState
from syncline.data import DistributedSampler
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.gradients.riders.requests import Newcomers
from syncline.optimizers.attached import AttachedOptimizer
from syncline.resilience.batches import Batches, Samples
from syncline.resilience.handover import receive_state, send_state
from syncline.resilience.membership import Membership
from syncline.resilience.parts import conclude, load_sent, num_steps_of, rounds_in, state_to_send
from syncline.resilience.undo import Residuals, Undo
from syncline.session.world import transport_of, world
from syncline.sharded.optimizer import Sharding


class Training:
    """The objects of one training state while `sl.steps` runs.

    Args:
        state: the training state.
        wrappers: its wrapped modules.
        attached: its optimizers.
        sampler: its sampler, if it has one.
        batches: the batches of this rank.
        has_state: whether this rank has the state of the first step. A process that joins does not.
    """

    def __init__(
        self,
        state: TrainState,
        wrappers: Sequence[DistributedDataParallel],
        attached: Sequence[AttachedOptimizer],
        sampler: DistributedSampler | None,
        batches: Batches,
        *,
        has_state: bool,
    ) -> None:
        self.state = state
        self._wrappers = wrappers
        self._attached = attached
        self._batches = batches
        self._has_state = has_state
        self._undo = Undo(state.named)
        self._residuals = Residuals(wrappers)
        self._rounds = rounds_in(wrappers)
        self._samples = Samples(sampler, self._rounds)
        for sharding in self._shardings:
            sharding.confirm()
        self._made = self._steps_now()
        """The number of steps that each optimizer had made before the first attempt of this step."""
        self._num_made = 0
        """The total number of steps of all optimizers before the last attempt."""
        self._is_begun_anew = False
        """Whether optimizers have stepped in an attempt that was interrupted."""
        self._num_uncounted: int | None = None
        """The number of samples of the last attempt, if it was interrupted before an optimizer stepped with them."""

    # ------------------------------------------------------------------ a step

    def begin_attempt(self) -> None:
        """Save the state that the body may change."""
        self._forget_newcomers()
        self._undo.begin()
        self._residuals.begin()
        steps = self._steps_now()
        self._is_begun_anew = any(attached.num_made_before for attached in self._attached)
        if not self._is_begun_anew:
            self._made = steps
        self._num_made = sum(steps)
        self._num_uncounted = None

    def end_attempt(self, num_samples: int | None) -> None:
        """Count the samples of an interrupted attempt, if an optimizer has stepped with them."""
        self._residuals.end()
        self._num_uncounted = num_samples
        self._count_samples()

    def _count_samples(self) -> None:
        sampler = self._samples.sampler
        if sampler is not None and self._num_uncounted and self._num_steps > self._num_made:
            sampler.advance(self._num_uncounted)
            self._samples.note()
            self._num_uncounted = None

    def undo(self) -> None:
        """Restore what an interrupted attempt has changed."""
        self._undo.restore()

    def commit(self, num_samples: int | None) -> None:
        """Commit the step."""
        if self._is_begun_anew and self._num_steps == self._num_made:  # all were made in earlier attempts
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

    def end_step(self) -> None:
        """Record that all ranks have committed the last step, before they stop between two steps."""
        self._made = self._steps_now()

    def _steps_now(self) -> list[int]:
        """Return the number of steps that each optimizer has made."""
        return [num_steps_of(attached) for attached in self._attached]

    @property
    def _num_steps(self) -> int:
        return sum(self._steps_now())

    @property
    def num_commits(self) -> int:
        """The number of commits of this rank; -1 if it has yet to load the state."""
        num_syncs = sum(rounds.standing.num_written for rounds in self._rounds)
        num_moves = sum(sharding.num_moves for sharding in self._shardings)
        return self.state.step + self._num_steps + num_syncs + num_moves if self._has_state else -1

    # ------------------------------------------------------------------ processes that want to join

    def look_for_newcomers(self, look: Callable[[], bool] | None) -> None:
        """Report to all ranks, after the same step, whether a process wants to join.

        Args:
            look: a function that returns whether a process wants to join. Only its result on rank 0 counts. None ends
                the reports.
        """
        for rounds in self._rounds:
            rounds.standing.begin(look)

        def look_in_backward() -> bool:
            # `look` checks only once in a while, so do not call it where its result has no effect.
            return look is not None and not self._meet_at_syncs and look()

        for newcomers in self._riders:
            newcomers.look = None if look is None else look_in_backward

    @property
    def ranks_meet(self) -> bool:
        """Whether all ranks take part in syncs or in gradient averages, so that they can stop after the same step."""
        if not self._rounds:
            return True
        drifting = [rounds for rounds in self._rounds if not rounds.is_synchronous]
        return self._meet_at_syncs or len(drifting) < len(self._wrappers)

    @property
    def _meet_at_syncs(self) -> bool:
        return any(rounds.meets_at_syncs for rounds in self._rounds)

    def newcomers_wait(self) -> bool:
        """Return whether rank 0 has reported a process that wants to join. The result is the same on all ranks."""
        if self._rounds and self._meet_at_syncs:
            return any(rounds.standing.someone_waits for rounds in self._rounds if rounds.meets_at_syncs)
        return any(newcomers.are_waiting for newcomers in self._riders)

    def _forget_newcomers(self) -> None:
        for newcomers in self._riders:
            newcomers.are_waiting = False

    @property
    def _riders(self) -> list[Newcomers]:
        return [wrapper._replica.gradients.riders.newcomers for wrapper in self._wrappers]

    # ------------------------------------------------------------------ a change of the ranks

    def follow(self, membership: Membership) -> None:
        """Adapt the objects of the training state to a new membership. A collective call of its members."""
        here = world()
        transport = transport_of(None)
        self._undo.clear_gradients()  # a process that joins has none, and their memory is needed
        sources = [membership.members.index(name) for name in membership.sources]
        behind = [rank for rank in range(here.size) if rank not in sources]
        donors = sources if self._is_equal else sources[:1]
        for rounds in self._rounds:
            rounds.standing.conclude(is_written=here.rank in behind)
        for attached in self._attached:
            conclude(attached, is_made=here.rank in behind)
        self._count_samples()  # of a step completed here: if the load is interrupted, this rank is not behind again
        if here.rank in behind:
            self._settle_shards()
        for wrapper in self._wrappers:
            wrapper._replica.use_transport(transport)
        is_new, loads = not self._has_state, False
        if here.rank in donors:
            send_state(self._sent(), transport, behind, donors)
        elif here.rank in behind:
            # A joining process does not need its own state. A rank that is behind may still need it after an error.
            sent = receive_state(transport, donors, self._sent() if is_new else None)
            loads = is_new or len(self._rounds) < len(self._wrappers) or self._is_synchronous
            self._load(sent, values=loads)
            self._has_state = True
        for wrapper in self._wrappers:
            gradients = wrapper._replica.gradients
            gradients.state.count_from(self.state.step)
            gradients.riders.forwards.forget()  # those of an interrupted step, or of steps without other ranks
        self._forget_newcomers()  # also on a rank that has loaded the end of the step in which they were reported
        if self._rounds:
            self._samples.meet(transport, is_new=is_new, has_loaded=loads)
            for rounds in self._rounds:
                rounds.settle()
            self._deal(self._samples.place_after_meeting(transport))
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
    def _is_equal(self) -> bool:
        """Whether all ranks that are not behind have the same state, so that each can send a part of it."""
        encodes = any(wrapper._replica.config.compression is not None for wrapper in self._wrappers)
        return not self._rounds and not encodes  # each rank has its own residuals of a compression

    @property
    def _is_synchronous(self) -> bool:
        return any(rounds.is_synchronous for rounds in self._rounds)

    def _deal(self, place: dict[str, Any] | None = None) -> None:
        """Divide the unused samples of the epoch among the present ranks; see `Batches.deal`."""
        here = world()
        self._batches.deal(here.size, here.rank, place)
        self._samples.were_dealt()

    def _sent(self) -> dict[str, Any]:
        """Return the state to send to ranks that are behind."""
        return {
            "state": state_to_send(self.state),
            "num_steps": self._steps_now(),
            "made": self._made,
            "places": [rounds.place() for rounds in self._rounds],
        }

    def _load(self, sent: dict[str, Any], *, values: bool) -> None:
        """Load the state of another rank.

        Args:
            sent: the result of `_sent` on that rank.
            values: whether to load the values of modules and optimizers, too.
        """
        load_sent(self.state, sent["state"], values=values, own=self._has_state)
        for rounds, place in zip(self._rounds, sent["places"], strict=True):
            rounds.go_to(place)
        self._made, self._num_uncounted = sent["made"], None
        for attached, number in zip(self._attached, sent["num_steps"], strict=True):
            attached.num_steps = number
