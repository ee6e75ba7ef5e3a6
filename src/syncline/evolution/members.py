"""A population as far as one rank goes: parameters moved to a member and back, and the gradient that losses say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.given import checked_count, checked_kind, checked_number
from syncline.plan.population import noise_
from syncline.sync.one_copy import one_copy_of
from syncline.sync.tensors import named_tensors

__all__ = ["Members", "Settings", "trained_parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a step depends on besides parameters, losses and optimizer."""

    sigma: float
    population: int
    seed: int

    @staticmethod
    def checked(sigma: float, population: int, seed: int) -> Settings:
        checked_count("population", population, at_least=2)
        if population % 2:
            raise ValueError(
                f"expected population to be even, got {population}: it counts the evaluations of a step over all "
                "ranks, two for each mirrored pair"
            )
        return Settings(
            sigma=checked_number("sigma", sigma, above=0),
            population=int(population),
            seed=checked_count("seed", seed),
        )

    @property
    def num_pairs(self) -> int:
        return self.population // 2


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What a strategy moves, tied parameters once; an error where it must not."""
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "expected module to be a bare one, got DistributedDataParallel, whose forward makes collective calls, "
            "while ranks evaluate different numbers of members: pass ddp.module"
        )
    copies = [copy for part in module.modules() if (copy := one_copy_of(part)) is not None]
    if any(copy.is_common for copy in copies):
        raise ValueError(
            "the parameters of this module are one copy for all ranks (sl.share_): no rank could try a change of them "
            "for itself. Give every rank parameters of its own"
        )
    trained = [
        (name, t) for name, t in named_tensors(module) if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    if not sum(p.numel() for _, p in trained):
        raise ValueError(
            f"{type(module).__name__} has no parameter to train: expected some with requires_grad=True"
        )
    for name, p in trained:
        if not p.is_floating_point():
            raise ValueError(f"expected real parameters, got {name} of {p.dtype}: freeze it, or make it real")
    return trained


class Members:
    """Evaluates members of a population, and adds up what their losses say about the gradient.

    Beside the parameters it takes, during `evaluate`, a copy of them and of the buffers and one vector of float32 as
    long as all parameters; during `gradients` two such vectors.

    Args:
        module: whose parameters are moved.
        parameters: those that are.
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
        """The losses of these pairs, plus before minus. Parameters and buffers are left as they were, bit for bit."""
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
                    buffers.put_back()
        finally:  # an interrupt must not leave a member's parameters behind
            for p, kept in zip(self._parameters, before, strict=True):
                p.copy_(kept)
            buffers.put_back()
        return losses

    def gradients(self, weights: Sequence[float], settings: Settings, *, step: int) -> Iterator[Tensor]:
        """The sum over all pairs of weight * noise, a tensor in the shape of each parameter: float32, on the CPU."""
        flat, total = self._vector(), self._vector().zero_()
        for pair, weight in enumerate(weights):
            if weight:
                noise_(flat, seed=settings.seed, step=step, pair=pair)
                # Multiply, then add: an add with a factor may or may not be fused, and ranks may differ in that.
                total.add_(flat.mul_(weight))
        return self._parts(total)

    def _vector(self) -> Tensor:
        return torch.empty(sum(self._numels), dtype=torch.float32, device="cpu")

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        for part, shape in zip(flat.split(self._numels), self._shapes, strict=True):
            yield part.view(shape)


class _Buffers:
    """A module's buffers as they were, to be put back: objects and values."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(owner, dict(owner._buffers)) for owner in module.modules() if owner._buffers]
        objects = [buffer for _, buffers in self._kept for buffer in buffers.values()]
        self._values = [(buffer, buffer.clone()) for buffer in objects if buffer is not None]

    def put_back(self) -> None:
        for owner, buffers in self._kept:
            owner._buffers.update(buffers)
        for buffer, values in self._values:
            buffer.copy_(values)


def _as_number(loss: float | Tensor) -> float:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TypeError(f"expected loss_fn(module) to return one number, got a tensor {tuple(loss.shape)}")
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(f"expected loss_fn(module) to return a number, got {loss!r}") from None
