"""Gossip: ranks average with a few others at a time, and what one has learnt reaches everybody in some rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, get_args

from syncline.contract import Rule, Rules
from syncline.given import checked_choice, checked_count, checked_number, store
from syncline.strategy.actions import Action, Average, Message, Push
from syncline.strategy.base import Progress, Spec, Strategy
from syncline.strategy.mechanism import Mechanism, PushSumWeight
from syncline.strategy.topology import Topology, neighbours
from syncline.strategy.words import every_words
from syncline.strategy.workers import OWN_OPTIMIZER, gradients_rule

__all__ = ["Gossip"]


class _State(NamedTuple):
    rank: int
    num_ranks: int
    round: int


@dataclass(frozen=True)
class Gossip(Strategy[_State]):
    """Step locally; every `every` steps each rank sends a part of itself to a few others, and adds up what it gets.

    No collective: nobody waits for more than its neighbours. Push-sum weights travel with the values (stochastic
    gradient push, Assran et al. 2019, arXiv 1811.10792), so that the ranks tend to the mean over ranks weighted by
    `weight`, whatever the topology. `ddp.sync_parameters_()` averages over all of them, exactly. The optimizer has to
    be attached.

    Args:
        topology: "ring", "exponential" or "pairs"; see `neighbours`.
        every: steps from one round to the next.
        weight: how much this rank counts, above 0; it may differ from rank to rank.
        seed: of the random pairs; the same on all ranks.

    Raises:
        TypeError, ValueError: an argument is out of bounds.

    Example:
        >>> strategy = Gossip("exponential")
        >>> state = strategy.init(Spec(rank=0, num_ranks=4, hosts=(0, 0, 0, 0), sizes_numel=(10,)))
        >>> state, actions = strategy.at_step(state, Progress(step=1))
        >>> actions, strategy.at_step(state, Progress(step=2))[1]
        ((Push(to=(1,), sources=(3,)),), (Push(to=(2,), sources=(2,)),))
    """

    state_type: ClassVar[type[tuple[object, ...]]] = _State
    situation_fields: ClassVar[frozenset[str]] = frozenset({"rank", "num_ranks"})

    topology: Topology
    every: int = 1
    weight: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checked_choice("topology", self.topology, get_args(Topology))
        store(
            self,
            every=checked_count("every", self.every, at_least=1),
            weight=checked_number("weight", self.weight, above=0),
            seed=checked_count("seed", self.seed, at_least=0),
        )

    def init(self, spec: Spec) -> _State:
        return _State(rank=spec.rank, num_ranks=spec.num_ranks, round=0)

    def mechanism(self, spec: Spec) -> Mechanism:
        return PushSumWeight(self.weight)

    def at_backward(self, state: _State, progress: Progress) -> tuple[Action, ...]:
        return ()

    def at_step(
        self, state: _State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[_State, tuple[Action, ...]]:
        if progress.step % self.every or state.num_ranks == 1:
            return state, ()
        edges = neighbours(self.topology, state.num_ranks, state.round, self.seed)
        to = edges[state.rank]
        sources = tuple(rank for rank, targets in enumerate(edges) if state.rank in targets)
        state = state._replace(round=state.round + 1)
        return state, (Push(to, sources),) if to or sources else ()

    def at_meeting(self, state: _State, progress: Progress) -> tuple[_State, tuple[Action, ...]]:
        return state, (Average(by_weight=True),) if state.num_ranks > 1 else ()

    def rules(self, spec: Spec) -> Rules:
        often = every_words(self.every)
        num_sent = max(len(to) for to in neighbours(self.topology, spec.num_ranks, 0, self.seed))
        whom = {
            "ring": "both neighbours on a ring" if num_sent > 1 else "the other rank",
            "exponential": "the rank 1, 2, 4, ... places on",
            "pairs": f"a partner by lot (seed {self.seed})",
        }[self.topology]
        return Rules(
            strategy=str(replace(self, weight=1.0)),
            gradients=gradients_rule(None, 0),
            parameters=Rule(often, f"push-sum with {whom}", "unbounded, shrinks by rounds"),
            buffers_when=f"{often}, with the parameters",
            buffers_drift="unbounded, shrinks by rounds",
            buffers_how="push-sum, floating ones",
            optimizer=OWN_OPTIMIZER,
            at_step=(
                f"{often} parameters (and floating buffers, by their policy) are mixed with {whom}; else nothing sent"
            ),
        )
