"""Who sends to whom in a round of gossip: pure functions of the number of ranks and of the round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from syncline.given import did_you_mean

__all__ = ["Topology", "neighbours"]

Topology = Literal["ring", "exponential", "pairs"]
Edges = tuple[tuple[int, ...], ...]
"""For each rank, to whom it sends."""


def neighbours(topology: Topology, num_ranks: int, round: int, seed: int = 0) -> Edges:
    """To whom each rank sends in a round.

    "ring": to both neighbours. "exponential": to the rank 1, 2, 4, ... places on, a power of two a round, so that after
    log2(num_ranks) rounds everybody has heard of everybody. "pairs": the ranks are paired at random, the same way on
    all of them; with an odd number one is left out.

    Raises:
        ValueError: an unknown topology.

    Example:
        >>> neighbours("ring", 4, 0), neighbours("exponential", 4, 1)
        (((3, 1), (0, 2), (1, 3), (2, 0)), ((2,), (3,), (0,), (1,)))
        >>> edges = neighbours("pairs", 4, 7, seed=1)
        >>> all(edges[edges[rank][0]] == (rank,) for rank in range(4))
        True
    """
    if topology not in _EDGES:
        raise ValueError(
            f"expected topology to be one of {', '.join(get_args(Topology))}; got {topology!r}"
            + did_you_mean(topology, _EDGES)
        )
    if num_ranks == 1:
        return ((),)
    return _EDGES[topology](num_ranks, round, seed)


def _ring(num_ranks: int, round: int, seed: int) -> Edges:
    if num_ranks == 2:
        return ((1,), (0,))
    return tuple(((rank - 1) % num_ranks, (rank + 1) % num_ranks) for rank in range(num_ranks))


def _exponential(num_ranks: int, round: int, seed: int) -> Edges:
    hop = 1 << (round % (num_ranks - 1).bit_length())
    return tuple(((rank + hop) % num_ranks,) for rank in range(num_ranks))


def _pairs(num_ranks: int, round: int, seed: int) -> Edges:
    order = sorted(range(num_ranks), key=lambda rank: (_mixed(seed, round, rank), rank))
    edges: list[tuple[int, ...]] = [()] * num_ranks
    for a, b in zip(order[::2], order[1::2], strict=False):
        edges[a], edges[b] = (b,), (a,)
    return tuple(edges)


def _mixed(*numbers: int) -> int:
    """A number that looks random and is the same everywhere (the finalizer of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


_EDGES: dict[str, Callable[[int, int, int], Edges]] = {
    "ring": _ring,
    "exponential": _exponential,
    "pairs": _pairs,
}
