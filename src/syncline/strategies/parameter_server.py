"""A parameter server with bounded staleness whose shards are distributed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from syncline.checks import checked_count, store
from syncline.contract import Rule, Rules
from syncline.strategies.base import (
    Action,
    Adopt,
    AverageBuffers,
    Await,
    Close,
    Mechanism,
    Message,
    Progress,
    ServerShard,
    Spec,
    Strategy,
    Update,
)
from syncline.strategies.workers import OWN_OPTIMIZER, gradients_rule
from syncline.words import format_count


class _State(NamedTuple):
    rank: int
    clock: int
    """Number of steps whose update has been sent."""
    num_updates: tuple[int, ...]
    """For each rank, how many of its updates of this rank's shard have arrived."""
    closed: tuple[int, ...]
    """For each shard, the clock up to which this rank has its values."""
    until: int
    """The clock up to which all shards must be closed before this rank may continue."""


@dataclass(frozen=True)
class ParameterServer(Strategy[_State]):
    """Steps at each rank's own pace, at most `staleness` steps ahead of the values known from the other ranks.

    The parameters are cut into as many shards as there are ranks, and each rank serves one. After its step a rank sends
    each server how its parameters have moved. Once a server has the updates of all ranks for a step, it adds their
    mean, and sends the shard's values to all ranks. A rank that has taken later steps adds its own updates of those
    steps to the values. A rank waits only if its values are more than `staleness` steps old. This is stale-synchronous
    parallel training (Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
    server"). With staleness 0 all ranks are equal after every step. With more, the values that a rank computes with
    depend on timing, so two runs differ. `ddp.sync_parameters_()` waits for all updates; after it all ranks are equal.
    The optimizer has to be attached.

    Args:
        staleness: the number of steps that a rank may be ahead of the values that it has received.

    Raises:
        TypeError, ValueError: not an integer, or negative.

    Example:
        >>> strategy = ParameterServer(staleness=1)
        >>> state = strategy.init(Spec(rank=0, num_ranks=2, hosts=(0, 0), sizes_numel=(10,)))
        >>> state, actions = strategy.at_step(state, Progress(step=1))
        >>> actions
        (Update(clock=1),)
        >>> state, actions = strategy.at_step(state, Progress(step=2), [Message("update", 1, 1)])
        >>> actions  # its own shard is closed at 1, but it has nothing from the other server
        (Update(clock=2), Close(clock=1), Await())
        >>> strategy.at_step(state, Progress(step=2), [Message("values", 1, 1)])[1]
        (Adopt(shard=1, clock=1),)
    """

    state_type: ClassVar[type[tuple[object, ...]]] = _State
    situation_fields: ClassVar[frozenset[str]] = frozenset({"rank"})

    staleness: int

    def __post_init__(self) -> None:
        store(self, staleness=checked_count("staleness", self.staleness, at_least=0))

    def init(self, spec: Spec) -> _State:
        zeros = (0,) * spec.num_ranks
        return _State(rank=spec.rank, clock=0, num_updates=zeros, closed=zeros, until=0)

    def state_from(self, saved: Mapping[str, Any], spec: Spec) -> _State:
        state = super().state_from(saved, spec)
        if len(state.closed) == spec.num_ranks:
            return state
        # It was saved by another number of ranks, when all updates had arrived.
        all_in = (state.clock,) * spec.num_ranks
        return state._replace(num_updates=all_in, closed=all_in)

    def mechanism(self, spec: Spec) -> Mechanism:
        return ServerShard()

    def at_backward(self, state: _State, progress: Progress) -> tuple[Action, ...]:
        return ()

    def at_step(
        self, state: _State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[_State, tuple[Action, ...]]:
        return self._go_on(state, progress, inbox, staleness=self.staleness)

    def at_sync(self, state: _State, progress: Progress) -> tuple[_State, tuple[Action, ...]]:
        state, actions = self._go_on(state, progress, (), staleness=0)
        return state, (AverageBuffers(), *actions)

    def _go_on(
        self, state: _State, progress: Progress, inbox: Sequence[Message], *, staleness: int
    ) -> tuple[_State, tuple[Action, ...]]:
        if len(state.closed) == 1:
            return state, ()
        actions: list[Action] = []
        num_updates, closed = list(state.num_updates), list(state.closed)
        clock, until = state.clock, state.until
        if progress.step > clock:
            clock += 1
            num_updates[state.rank] = clock
            actions.append(Update(clock))
            until = max(until, clock - staleness)
        elif not inbox:
            until = max(until, clock - staleness)
        for message in inbox:
            if message.kind == "update":
                num_updates[message.rank] = message.clock
            else:
                closed[message.rank] = message.clock
                actions.append(Adopt(message.rank, message.clock))
        while min(num_updates) > closed[state.rank]:
            closed[state.rank] += 1
            actions.append(Close(closed[state.rank]))
        if min(closed) < until:
            actions.append(Await())
        state = _State(state.rank, clock, tuple(num_updates), tuple(closed), until)
        return state, tuple(actions)

    def rules(self, spec: Spec) -> Rules:
        late = (
            "none after a step"
            if not self.staleness
            else f"{format_count(self.staleness, 'step')} and what is under way"
        )
        how = f"updates to {spec.num_ranks} servers, a shard each; their mean back"
        return Rules(
            strategy=str(self),
            gradients=gradients_rule(None, 0),
            parameters=Rule("every step", how, late),
            buffers_when="only when asked: ddp.sync_parameters_()",
            buffers_drift="unbounded",
            optimizer=OWN_OPTIMIZER,
            at_step=(
                f"each rank sends how its parameters moved to {spec.num_ranks} servers, a shard each, and takes over "
                f"what they have; it waits where that is more than {format_count(self.staleness, 'step')} old"
            ),
        )
