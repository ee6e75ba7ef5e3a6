"""The members of a population: their assignment to ranks, their noise, and the gradient estimated from their losses.

A member is the module with changed parameters. A population consists of mirrored pairs of members. The members of pair
p have the parameters plus sigma * noise(p), and the parameters minus sigma * noise(p). The noise depends only on the
seed, the step and the pair, so each rank can generate the noise of any pair. `Members` evaluates the members of one
module on one rank.

Source: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017,
https://arxiv.org/abs/1703.03864, from which mirrored sampling, centered ranks and known seeds (algorithm 2) are taken.
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
    """Return the indices of the pairs that a rank evaluates.

    Pairs are assigned to the ranks in turn, so the numbers of pairs of two ranks differ by one at most.

    Examples:
        >>> [list(pairs_of(rank, 3, num_pairs=4)) for rank in range(3)]
        [[0, 3], [1], [2]]
    """
    return range(rank, num_pairs, num_ranks)


def in_order(rows: Sequence[Sequence[float]], num_pairs: int) -> list[float]:
    """Return the losses of all members in the order of the pairs, from one row of losses per rank.

    Args:
        rows: one row per rank, in rank order. A row contains two losses for each of the rank's pairs (`pairs_of`), and
            then padding.
        num_pairs: the number of pairs over all ranks.

    Examples:
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
    """Return the 32-bit seed for the noise of one pair. torch's CPU generator uses only 32 bits of a seed.

    Two pairs of one step never have the same seed. Two pairs of different steps have the same seed with a probability
    of 1 in 4 billion, which does no harm.

    Examples:
        >>> noise_seed(0, 1, 0), noise_seed(0, 1, 1)
        (3445662366, 1805130831)
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") + pair) * _STRIDE % _SEEDS


def noise_(out: Tensor, *, seed: int, step: int, pair: int) -> Tensor:
    """Fill the tensor `out` with the noise of one pair: independent normal values of mean 0 and variance 1.

    The values depend neither on torch's global generator nor on the number of threads.

    Args:
        out: a flat float32 tensor on the CPU. Generators of other devices would give other values.
        seed: the seed of the run.
        step: the number of the step.
        pair: the index of the pair.

    Returns:
        The tensor `out`.
    """
    generator = torch.Generator("cpu").manual_seed(noise_seed(seed, step, pair))
    return out.normal_(generator=generator)


# ---------------------------------------------------------------------- gradient weights from losses


def centered_ranks(losses: Sequence[float]) -> list[float]:
    """Return each loss's place in the sorted order, scaled to the range from -0.5 (best) to 0.5 (worst).

    Only the order of the losses matters. Equal losses get the mean of their scaled places, so that a pair with equal
    losses does not move the parameters. All losses that are not finite, also minus infinity, count as the worst.

    Examples:
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
    """Return the weight of each pair in the estimated gradient, which is the sum of weight * noise over all pairs.

    Args:
        losses: the losses of all members, two per pair: first the loss for plus sigma * noise, then that for minus.
        sigma: the factor of the noise.

    Examples:
        >>> pair_weights([1.0, 4.0, 3.0, 3.0], sigma=0.5)  # the losses of pair 1 are equal, so its weight is 0
        [-0.5, 0.0]
    """
    ranks = centered_ranks(losses)
    scale = 1 / (len(losses) * sigma)
    return [(plus - minus) * scale for plus, minus in zip(ranks[::2], ranks[1::2], strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of an EvolutionStrategy that affect every step: sigma, population and seed.

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
                f"expected population to be even, got {population}. It is the number of members over all ranks, and "
                "members are evaluated in mirrored pairs"
            )
        sigma, seed = checked_number("sigma", self.sigma, above=0), checked_count("seed", self.seed)
        store(self, sigma=sigma, population=population, seed=seed)

    @property
    def num_pairs(self) -> int:
        return self.population // 2


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the names and the parameters that an EvolutionStrategy trains. A tied parameter is returned once.

    Raises:
        TypeError: `module` is not a torch.nn.Module.
        ValueError: the module is wrapped, shared by `sl.share_`, or without suitable parameters.
    """
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "EvolutionStrategy: expected a module that contains no DistributedDataParallel, got one that does. A "
            "wrapped forward makes collective calls, but ranks can evaluate different numbers of members. Unwrap the "
            "module: pass ddp.module"
        )
    copies = [one_copy_of(part) for part in module.modules()]
    if any(copy is not None and copy.is_common for copy in copies):
        raise ValueError(
            "EvolutionStrategy: expected a module whose parameters are a separate copy on every rank, got a module "
            "whose parameters are one copy for all ranks (sl.share_). To evaluate a member, a rank changes its "
            "parameters, and the other ranks must not see the change. Pass a module without sl.share_"
        )
    trained = [
        (name, t) for name, t in named_tensors(module) if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    if not sum(p.numel() for _, p in trained):
        raise ValueError(
            f"EvolutionStrategy: {type(module).__name__} has no parameter to train. Expected at least one parameter "
            "with requires_grad=True that is not empty"
        )
    for name, p in trained:
        if not p.is_floating_point():
            raise ValueError(
                f"EvolutionStrategy: expected real floating-point parameters, but {name} is of {p.dtype}. Freeze this "
                "parameter (requires_grad=False), or convert it to float32"
            )
    return trained


class Members:
    """An object that evaluates the members of a population for one module, and estimates the gradient.

    `evaluate` needs memory for a copy of the parameters and buffers, and for one float32 vector with as many elements
    as all parameters. `gradients` needs memory for two such vectors.

    Args:
        module: the module to evaluate.
        parameters: the parameters of the module that differ between members.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        self._parameters = list(parameters)

    @torch.no_grad()
    def evaluate(
        self,
        loss_fn: Callable[[nn.Module], float | Tensor],
        pairs: Iterable[int],
        settings: Settings,
        *,
        step: int,
    ) -> list[float]:
        """Evaluate both members of each pair, and restore parameters and buffers bit for bit.

        Args:
            loss_fn: a function that gets the module with a member's parameters, and returns the loss of the member.
            pairs: the indices of the pairs to evaluate.
            settings: sigma and the seed.
            step: the number of the step.

        Returns:
            Two losses per pair, in the order of `pairs`: first the loss for plus sigma * noise, then that for minus.
        """
        before = [p.detach().clone() for p in self._parameters]
        tables = [(owner._buffers, dict(owner._buffers)) for owner in self._module.modules()]
        values = [(buffer, buffer.clone()) for buffer in self._module.buffers()]

        def restore_buffers() -> None:
            for table, registered in tables:
                table.update(registered)
            for buffer, value in values:
                buffer.copy_(value)

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
                    restore_buffers()
        finally:  # so that an interrupt does not leave a member's parameters in the module
            for p, kept in zip(self._parameters, before, strict=True):
                p.copy_(kept)
            restore_buffers()
        return losses

    def gradients(self, weights: Sequence[float], settings: Settings, *, step: int) -> Iterator[Tensor]:
        """Return the estimated gradient of each parameter, which is the sum of weight * noise over all pairs.

        Args:
            weights: the weight of each pair, as `pair_weights` returns it.
            settings: the settings, of which only the seed is used.
            step: the number of the step.

        Returns:
            An iterator over float32 tensors on the CPU, one per parameter. Each has the shape of its parameter.
        """
        flat, total = self._vector(), self._vector().zero_()
        for pair, weight in enumerate(weights):
            if weight:
                noise_(flat, seed=settings.seed, step=step, pair=pair)
                # Multiply, then add: a scaled add may or may not be fused, and then ranks could differ.
                total.add_(flat.mul_(weight))
        return self._parts(total)

    def _vector(self) -> Tensor:
        return torch.empty(sum(p.numel() for p in self._parameters), dtype=torch.float32, device="cpu")

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        parts = flat.split([p.numel() for p in self._parameters])
        return (part.view(p.shape) for p, part in zip(self._parameters, parts, strict=True))


def _as_number(loss: float | Tensor) -> float:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TypeError(
            "expected loss_fn(module) to return a number or a tensor of one element, got a tensor of shape "
            f"{tuple(loss.shape)}"
        )
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(
            f"expected loss_fn(module) to return a number or a tensor of one element, got {loss!r}"
        ) from None
