"""ParameterServer: a strategy with bounded staleness, under which each rank serves one shard of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from syncline.checks import checked_count, store, suggests_arguments
from syncline.contract import Rule, Rules
from syncline.strategies.actions import (
    Action,
    Adopt,
    Average,
    AverageBuffers,
    Await,
    Close,
    Mechanism,
    Message,
    RestartOuter,
    ServerShard,
    Update,
)
from syncline.strategies.base import Decision, Progress, Spec, Strategy
from syncline.words import format_count


class _State(NamedTuple):
    rank: int
    clock: int
    """The last step for which this rank has sent its updates."""
    num_updates: tuple[int, ...]
    """For each sender, how many of its updates for this rank's shard have arrived."""
    closed: tuple[int, ...]
    """For each shard, the last step whose updates this rank's values of the shard contain."""
    until: int
    """The step that each element of `closed` must reach before this rank continues."""


@suggests_arguments
@dataclass(frozen=True, repr=False)
class ParameterServer(Strategy[_State]):
    """A strategy under which each rank steps at its own pace, and waits only if its values are too old.

    The parameters are cut into one shard per rank, and each rank is the server of one shard. After a step, a rank sends
    one update to the server of each shard: the change of the shard's parameters in the step. When a server has the
    updates of all ranks for a step, it adds their mean to the shard, and sends the shard's values to all ranks. A rank
    that has taken later steps adds its own updates of these steps to the values that it receives. A rank waits only if
    its values of a shard are more than `staleness` steps old. This is stale-synchronous parallel training (Ho et al.
    2013, "More effective distributed ML via a stale synchronous parallel parameter server").

    With staleness 0, the parameters are equal on all ranks after every step. With a higher staleness, the values with
    which a rank computes depend on timing, so two runs give different results. `ddp.sync_parameters_()` waits for all
    updates. Afterwards the parameters are equal on all ranks. The optimizer has to be attached.

    Args:
        staleness: the largest permitted age, in steps, of the values that a rank has received from the servers.

    Raises:
        TypeError: `staleness` is not an integer.
        ValueError: `staleness` is negative.

    Examples:
        >>> strategy = ParameterServer(staleness=1)
        >>> state = strategy.init(Spec(rank=0, num_ranks=2, hosts=(0, 0), sizes_numel=(10,)))
        >>> state, actions = strategy.at_step(state, Progress(step=1))
        >>> actions
        (Update(clock=1),)
        >>> state, actions = strategy.at_step(state, Progress(step=2), [Message("update", 1, 1)])
        >>> actions  # rank 0 closes step 1 of its own shard, and waits for the values of rank 1's shard
        (Update(clock=2), Close(clock=1), Await())
        >>> strategy.at_step(state, Progress(step=2), [Message("values", 1, 1)])[1]
        (Adopt(shard=1, clock=1),)
    """

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
        # The state was saved by another number of ranks. All updates had arrived then.
        complete = (state.clock,) * spec.num_ranks
        return state._replace(num_updates=complete, closed=complete)

    def mechanism(self, spec: Spec) -> Mechanism:
        return ServerShard()

    def at_step(self, state: _State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[_State]:
        """Return the new state, and the actions to carry out after a step.

        The actions send the update of a new step, adopt the received shards, complete the steps for which all updates
        of this rank's shard have arrived, and wait if a shard's values are more than `staleness` steps old.
        """
        if len(state.closed) == 1:
            return state, ()
        actions: list[Action] = []
        clock, num_updates, closed = state.clock, list(state.num_updates), list(state.closed)
        if progress.step > clock:
            clock += 1
            num_updates[state.rank] = clock
            actions.append(Update(clock))
        for message in inbox:
            if message.kind == "update":
                num_updates[message.rank] = message.clock
            else:
                closed[message.rank] = message.clock
                actions.append(Adopt(message.rank, message.clock))
        while min(num_updates) > closed[state.rank]:
            closed[state.rank] += 1
            actions.append(Close(closed[state.rank]))
        until = max(state.until, clock - self.staleness)
        if min(closed) < until:
            actions.append(Await())
        return _State(state.rank, clock, tuple(num_updates), tuple(closed), until), tuple(actions)

    def at_sync(self, state: _State, progress: Progress) -> Decision[_State]:
        state, actions = ParameterServer(staleness=0).at_step(state, progress)
        return state, (AverageBuffers(), *actions)

    def at_change(self, state: _State, progress: Progress, spec: Spec) -> Decision[_State]:
        # Updates in flight are lost, and each rank's values contain its own updates. So their mean is what the servers
        # would have sent.
        now = (progress.step,) * spec.num_ranks
        state = _State(spec.rank, clock=progress.step, num_updates=now, closed=now, until=0)
        return state, (Average(), RestartOuter()) if spec.num_ranks > 1 else ()

    def rules(self, spec: Spec) -> Rules:
        late = (
            "none after a step"
            if not self.staleness
            else f"{format_count(self.staleness, 'step')} and updates in flight"
        )
        how = f"updates to {spec.num_ranks} servers, one per shard, which return their mean"
        return Rules(
            strategy=str(self),
            parameters=Rule("every step", how, late),
            buffers_when="only when asked: ddp.sync_parameters_()",
            buffers_drift="unbounded",
            at_step=(
                f"each rank sends the changes of its parameters to {spec.num_ranks} servers, one per shard, and adopts "
                f"the values that they send; it waits if these are more than {format_count(self.staleness, 'step')} old"
            ),
        )
