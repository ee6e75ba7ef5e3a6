"""Members of a population: their assignment to ranks, their noise, and the gradient estimated from their losses.

A population consists of mirrored pairs. Pair p is evaluated at parameters + sigma * noise(p), and at parameters - sigma
* noise(p). The noise depends only on seed, step and pair, so each rank can generate the noise of any pair. `Members`
does this for one module on one rank. The functions before it are plain arithmetic.

Method: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017,
https://arxiv.org/abs/1703.03864: mirrored sampling, centered ranks, known random seeds (algorithm 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from syncline.checks import checked_count, checked_kind, checked_number, store
from syncline.sharded.sharing import one_copy_of
from syncline.tensors.targets import named_tensors

_SEEDS = 1 << 32

_STRIDE = 0x9E3779B1  # odd, so that multiplying by it is one-to-one; 2**32 / golden ratio spreads neighbours


# ---------------------------------------------------------------------- assignment to ranks


def pairs_of(rank: int, num_ranks: int, num_pairs: int) -> range:
    """Return the pairs that a rank evaluates. Pairs are assigned in turn, so ranks differ by one pair at most.

    Example:
        >>> [list(pairs_of(rank, 3, num_pairs=4)) for rank in range(3)]
        [[0, 3], [1], [2]]
    """
    return range(rank, num_pairs, num_ranks)


def in_order(rows: Sequence[Sequence[float]], num_pairs: int) -> list[float]:
    """Return the losses of all members, pair by pair, from the rows of all ranks.

    Args:
        rows: one row per rank, in rank order: two losses for each pair of `pairs_of`, then padding.
        num_pairs: number of pairs over all ranks.

    Example:
        >>> in_order([[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 0.0, 0.0]], num_pairs=3)
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    losses: list[float] = []
    for pair in range(num_pairs):
        nth = pair // len(rows)
        losses += rows[pair % len(rows)][2 * nth : 2 * nth + 2]
    return losses


# ---------------------------------------------------------------------- noise


def noise_seed(seed: int, step: int, pair: int) -> int:
    """Return the seed of one pair's noise, which has 32 bits, because torch's CPU generator uses no more.

    Pairs of one step never have equal seeds. Pairs of different steps have equal seeds once in billions of pairs, which
    does no harm.

    Example:
        >>> noise_seed(0, 1, 0), noise_seed(0, 1, 1)
        (3445662366, 1805130831)
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") + pair) * _STRIDE % _SEEDS


def noise_(out: Tensor, *, seed: int, step: int, pair: int) -> Tensor:
    """Fill `out` with the noise of one pair: independent, of mean 0 and variance 1.

    The result depends neither on torch's global generator nor on the number of threads.

    Args:
        out: flat, float32, on the CPU, because generators of other devices give other numbers.
        seed: seed of the run.
        step: number of the step.
        pair: index of the pair.

    Returns:
        `out`.
    """
    generator = torch.Generator("cpu").manual_seed(noise_seed(seed, step, pair))
    return out.normal_(generator=generator)


# ---------------------------------------------------------------------- gradient weights from losses


def centered_ranks(losses: Sequence[float]) -> list[float]:
    """Replace losses by evenly spaced numbers from -0.5 (the best) to 0.5 (the worst). Only the order of losses counts.

    Equal losses get the mean of their numbers, so that they do not move the parameters. Losses that are not finite
    (including minus infinity) all count as the worst.

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
    """Return each pair's weight in the estimated gradient, which is the sum of weight * noise over all pairs.

    Args:
        losses: losses of all members, pair by pair: first at parameters + sigma * noise, then at the mirrored point.
        sigma: factor of the noise.

    Example:
        >>> pair_weights([1.0, 4.0, 3.0, 3.0], sigma=0.5)  # the losses of pair 1 are equal, so its weight is 0
        [-0.5, 0.0]
    """
    ranks = centered_ranks(losses)
    scale = 1 / (len(losses) * sigma)
    return [(plus - minus) * scale for plus, minus in zip(ranks[::2], ranks[1::2], strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings on which a step depends, besides parameters, losses and optimizer.

    Raises:
        TypeError, ValueError: a setting is invalid.
    """

    sigma: float
    population: int
    seed: int

    def __post_init__(self) -> None:
        population = checked_count("population", self.population, at_least=2)
        if population % 2:
            raise ValueError(
                f"expected population to be even, got {population}: it is the number of evaluations of a step over all "
                "ranks, and members are evaluated in mirrored pairs"
            )
        sigma, seed = checked_number("sigma", self.sigma, above=0), checked_count("seed", self.seed)
        store(self, sigma=sigma, population=population, seed=seed)

    @property
    def num_pairs(self) -> int:
        return self.population // 2


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters to train, with their names; tied parameters once.

    Raises:
        TypeError, ValueError: the module is not suitable.
    """
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "EvolutionStrategy: expected a module that is not wrapped, got DistributedDataParallel. Its forward makes "
            "collective calls, but ranks evaluate different numbers of members: pass ddp.module"
        )
    copies = [one_copy_of(part) for part in module.modules()]
    if any(copy is not None and copy.is_common for copy in copies):
        raise ValueError(
            "EvolutionStrategy: the parameters of this module are one copy for all ranks (sl.share_), so no rank could "
            "change them alone to evaluate a member. Use a module of which every rank has its own parameters"
        )
    trained = [
        (name, t) for name, t in named_tensors(module) if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    if not sum(p.numel() for _, p in trained):
        raise ValueError(
            f"EvolutionStrategy: {type(module).__name__} has no parameter to train. Expected at least one parameter "
            "with requires_grad=True"
        )
    for name, p in trained:
        if not p.is_floating_point():
            raise ValueError(
                f"EvolutionStrategy: expected real floating-point parameters, but {name} is {p.dtype}. Freeze it "
                "(requires_grad=False), or convert it"
            )
    return trained


class Members:
    """The members of a population for one module: their evaluation, and the gradient estimated from their losses.

    Besides the parameters, `evaluate` needs memory for a copy of the parameters and buffers, and for one float32 vector
    as long as all parameters. `gradients` needs two such vectors.

    Args:
        module: the module to evaluate.
        parameters: the parameters that are changed.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        self._parameters = list(parameters)
        self._shapes = [p.shape for p in self._parameters]
        self._numels = [p.numel() for p in self._parameters]

    @torch.no_grad()
    def evaluate(
        self,
        loss_fn: Callable[[nn.Module], float | Tensor],
        pairs: Iterable[int],
        settings: Settings,
        *,
        step: int,
    ) -> list[float]:
        """Return the two losses of each pair, in order. Parameters and buffers are restored bit for bit."""
        before = [p.detach().clone() for p in self._parameters]
        buffers = _Buffers(self._module)
        flat = self._vector()
        losses = []
        try:
            for pair in pairs:
                noise_(flat, seed=settings.seed, step=step, pair=pair)
                noise = [
                    part.to(p.device) for p, part in zip(self._parameters, self._parts(flat), strict=True)
                ]
                for sign in (1, -1):
                    for p, kept, part in zip(self._parameters, before, noise, strict=True):
                        p.copy_(kept).add_(part, alpha=sign * settings.sigma)
                    losses.append(_as_number(loss_fn(self._module)))
                    buffers.restore()
        finally:  # so that an interrupt does not leave a member's parameters in the module
            for p, kept in zip(self._parameters, before, strict=True):
                p.copy_(kept)
            buffers.restore()
        return losses

    def gradients(self, weights: Sequence[float], settings: Settings, *, step: int) -> Iterator[Tensor]:
        """Return the estimated gradient of each parameter: the sum of weight * noise over pairs, float32 on the CPU."""
        flat, total = self._vector(), self._vector().zero_()
        for pair, weight in enumerate(weights):
            if weight:
                noise_(flat, seed=settings.seed, step=step, pair=pair)
                # Multiply, then add: a scaled add may or may not be fused, and then ranks could differ.
                total.add_(flat.mul_(weight))
        return self._parts(total)

    def _vector(self) -> Tensor:
        return torch.empty(sum(self._numels), dtype=torch.float32, device="cpu")

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        for part, shape in zip(flat.split(self._numels), self._shapes, strict=True):
            yield part.view(shape)


class _Buffers:
    """A copy of a module's buffers, of both the objects and their values, to restore them."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(owner, dict(owner._buffers)) for owner in module.modules() if owner._buffers]
        objects = [buffer for _, buffers in self._kept for buffer in buffers.values()]
        self._values = [(buffer, buffer.clone()) for buffer in objects if buffer is not None]

    def restore(self) -> None:
        for owner, buffers in self._kept:
            owner._buffers.update(buffers)
        for buffer, values in self._values:
            buffer.copy_(values)


def _as_number(loss: float | Tensor) -> float:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TypeError(
            f"expected loss_fn(module) to return one number, got a tensor of shape {tuple(loss.shape)}"
        )
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(f"expected loss_fn(module) to return a number, got {loss!r}") from None
