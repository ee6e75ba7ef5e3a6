"""Gossip: in each round, a rank averages its values with those of a few other ranks.

After some rounds, the changes of a rank have reached all ranks. The topology determines the ranks to which each rank
sends in a round. The function `neighbours` computes these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

from syncline.checks import checked_choice, checked_count, checked_number, store, suggests_arguments
from syncline.contract import Rule, Rules
from syncline.strategies.actions import Average, Mechanism, Message, Push, PushSumWeight
from syncline.strategies.base import Decision, Progress, Spec, Strategy, every_words

Topology = Literal["ring", "exponential", "pairs"]

Edges = tuple[tuple[int, ...], ...]
"""For each rank, the ranks to which it sends."""


def neighbours(topology: Topology, num_ranks: int, round: int, seed: int = 0) -> Edges:
    """Return, for each rank, the ranks to which it sends in a round.

    - "ring": each rank sends to the next and to the previous rank.
    - "exponential": each rank sends to one rank: 1 place further in the first round, 2 in the second, 4 in the third,
      and so on. After log2(num_ranks) rounds (rounded up), each rank's values have reached all ranks, and the distances
      start again at 1.
    - "pairs": the ranks are divided into random pairs, and the two ranks of a pair send to each other. All ranks
      compute the same pairs from `seed`. If the number of ranks is odd, one rank does not send in this round.

    Raises:
        ValueError: the topology is unknown.

    Examples:
        >>> neighbours("ring", 4, 0), neighbours("exponential", 4, 1)
        (((3, 1), (0, 2), (1, 3), (2, 0)), ((2,), (3,), (0,), (1,)))
        >>> edges = neighbours("pairs", 4, 7, seed=1)
        >>> all(edges[edges[rank][0]] == (rank,) for rank in range(4))
        True
    """
    checked_choice("topology", topology, get_args(Topology))
    ranks = range(num_ranks)
    if num_ranks == 1:
        return ((),)
    if topology == "ring":
        return tuple(tuple(dict.fromkeys([(r - 1) % num_ranks, (r + 1) % num_ranks])) for r in ranks)
    if topology == "exponential":
        hop = 1 << (round % (num_ranks - 1).bit_length())
        return tuple(((rank + hop) % num_ranks,) for rank in ranks)
    order = sorted(ranks, key=lambda rank: (_mixed(seed, round, rank), rank))
    edges: list[tuple[int, ...]] = [()] * num_ranks
    for a, b in zip(order[::2], order[1::2], strict=False):
        edges[a], edges[b] = (b,), (a,)
    return tuple(edges)


def _mixed(*numbers: int) -> int:
    """Return a pseudorandom 64-bit integer that depends only on the integers `numbers`, by the splitmix64 hash."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


class _State(NamedTuple):
    rank: int
    num_ranks: int
    round: int


@suggests_arguments
@dataclass(frozen=True, repr=False)
class Gossip(Strategy[_State]):
    """A strategy under which ranks step alone, and every `every` steps send parts of their values to a few ranks.

    There is no collective, so a rank waits only for the ranks that send to it. The method is stochastic gradient push
    (Assran et al. 2019, arXiv 1811.10792): push-sum weights are sent with the values. Therefore the values of all ranks
    approach the same mean over ranks, weighted by `weight`, under every topology. `ddp.sync_parameters_()` computes
    that mean over all ranks exactly. The optimizer has to be attached.

    Args:
        topology: the ranks to which each rank sends: "ring" (the next and the previous rank), "exponential" (the rank
            1, 2, 4, ... places further, in turn) or "pairs" (a random partner).
        every: the number of steps between two rounds.
        weight: the weight of this rank in the mean, above 0. Ranks may have different weights.
        seed: the seed of the random pairs; the same on all ranks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the topology is unknown, or a number is out of bounds.

    Examples:
        >>> strategy = Gossip("exponential")
        >>> state = strategy.init(Spec(rank=0, num_ranks=4, hosts=(0, 0, 0, 0), sizes_numel=(10,)))
        >>> state, actions = strategy.at_step(state, Progress(step=1))
        >>> actions, strategy.at_step(state, Progress(step=2))[1]
        ((Push(to=(1,), sources=(3,)),), (Push(to=(2,), sources=(2,)),))
    """

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

    def at_step(self, state: _State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[_State]:
        if progress.step % self.every or state.num_ranks == 1:
            return state, ()
        edges = neighbours(self.topology, state.num_ranks, state.round, self.seed)
        to = edges[state.rank]
        sources = tuple(rank for rank, targets in enumerate(edges) if state.rank in targets)
        state = state._replace(round=state.round + 1)
        return state, (Push(to, sources),) if to or sources else ()

    def at_sync(self, state: _State, progress: Progress) -> Decision[_State]:
        return state, (Average(by_weight=True),) if state.num_ranks > 1 else ()

    def rules(self, spec: Spec) -> Rules:
        often = every_words(self.every)
        num_sent = max(len(to) for to in neighbours(self.topology, spec.num_ranks, 0, self.seed))
        whom = {
            "ring": "both neighbours on a ring" if num_sent > 1 else "the other rank",
            "exponential": "the rank 1, 2, 4, ... places further",
            "pairs": f"a random partner (seed {self.seed})",
        }[self.topology]
        return Rules(
            strategy=str(replace(self, weight=1.0)),
            parameters=Rule(often, f"push-sum with {whom}", "unbounded, shrinks by rounds"),
            buffers_when=f"{often}, with the parameters",
            buffers_drift="unbounded, shrinks by rounds",
            buffers_how="push-sum, floating ones",
            at_step=(
                f"{often} parameters (and floating buffers, by their policy) are mixed with {whom}; else nothing sent"
            ),
        )
