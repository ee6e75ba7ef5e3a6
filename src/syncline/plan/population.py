"""Evolution strategies as arithmetic: who evaluates what, which noise belongs to it, what the losses say.

A population consists of mirrored pairs: pair p is evaluated at parameters + sigma * noise(p), and at parameters minus
the same. The noise depends on seed, step and pair alone, not on ranks, so that any rank can make that of any pair.

Method: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017,
https://arxiv.org/abs/1703.03864: mirrored sampling, centered ranks, known random seeds (algorithm 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

__all__ = ["centered_ranks", "in_order", "noise_", "noise_seed", "pair_weights", "pairs_of"]

_SEEDS = 1 << 32
_STRIDE = 0x9E3779B1  # odd, so that multiplying by it is one-to-one; 2**32 / golden ratio spreads neighbours


# ---------------------------------------------------------------------- who evaluates what


def pairs_of(rank: int, num_ranks: int, num_pairs: int) -> range:
    """The pairs that a rank evaluates: dealt out one by one, so the ranks' numbers differ by one at most.

    Example:
        >>> [list(pairs_of(rank, 3, num_pairs=4)) for rank in range(3)]
        [[0, 3], [1], [2]]
    """
    return range(rank, num_pairs, num_ranks)


def in_order(rows: Sequence[Sequence[float]], num_pairs: int) -> list[float]:
    """The losses of all members, pair by pair, from what each rank has of its own pairs.

    Args:
        rows: of each rank, in rank order: two losses for each of `pairs_of`, then whatever fills up the row.

    Example:
        >>> in_order([[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 0.0, 0.0]], num_pairs=3)
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    losses: list[float] = []
    for pair in range(num_pairs):
        nth = pair // len(rows)
        losses += rows[pair % len(rows)][2 * nth : 2 * nth + 2]
    return losses


# ---------------------------------------------------------------------- which noise belongs to it


def noise_seed(seed: int, step: int, pair: int) -> int:
    """The seed of one pair's noise, of 32 bits: torch's generator on the CPU looks at no more.

    Pairs of one step never share a seed. Those of different steps may, once in billions, which does no harm.

    Example:
        >>> noise_seed(0, 1, 0), noise_seed(0, 1, 1)
        (3445662366, 1805130831)
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") + pair) * _STRIDE % _SEEDS


def noise_(out: Tensor, *, seed: int, step: int, pair: int) -> Tensor:
    """Fill `out` with the noise of one pair: independent, of mean 0 and variance 1.

    Neither torch's global generator nor the number of threads has a part in it.

    Args:
        out: flat, float32, on the CPU (all machines have one; generators of other devices give other numbers).

    Returns:
        `out`.
    """
    generator = torch.Generator("cpu").manual_seed(noise_seed(seed, step, pair))
    return out.normal_(generator=generator)


# ---------------------------------------------------------------------- what the losses say


def centered_ranks(losses: Sequence[float]) -> list[float]:
    """Losses as evenly spaced numbers from -0.5 (the best) to 0.5 (the worst): their order counts, not their size.

    Equal losses share the mean of their places, so that what cannot be told apart moves nothing. Losses that are not
    finite (minus infinity as well) are the worst, all the same.

    Example:
        >>> centered_ranks([0.3, 1e9, float("nan"), 0.1, 0.3])
        [-0.125, 0.25, 0.5, -0.5, -0.125]
    """
    if len(losses) < 2:
        return [0.0] * len(losses)
    keys = [loss if math.isfinite(loss) else math.inf for loss in losses]
    ranks = [0.0] * len(keys)
    place = 0
    for _, tied in groupby(sorted(range(len(keys)), key=keys.__getitem__), key=keys.__getitem__):
        members = list(tied)
        middle = place + (len(members) - 1) / 2
        for member in members:
            ranks[member] = middle / (len(keys) - 1) - 0.5
        place += len(members)
    return ranks


def pair_weights(losses: Sequence[float], sigma: float) -> list[float]:
    """What the noise of each pair counts in the estimated gradient: gradient = sum over pairs of weight * noise.

    Args:
        losses: of all members, pair by pair, plus before minus: twice as many as pairs.
        sigma: how far the members are from the parameters, in standard deviations of the noise.

    Example:
        >>> pair_weights([1.0, 4.0, 3.0, 3.0], sigma=0.5)  # pair 0 is better plus than minus; pair 1 says nothing
        [-0.5, 0.0]
    """
    ranks = centered_ranks(losses)
    scale = 1 / (len(losses) * sigma)
    return [(plus - minus) * scale for plus, minus in zip(ranks[::2], ranks[1::2], strict=True)]
