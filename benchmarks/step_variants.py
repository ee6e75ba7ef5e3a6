"""The variants of `step.py --variants`: a model, and the switches that both classes are given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import syncline as sl
from models import (
    CNN,
    GPT,
    Chain,
    GPTConfig,
    GPTWithDict,
    GPTWithOutput,
    GPTWithUnusedBranch,
    random_batch,
    random_images,
)

__all__ = ["GOAL", "VARIANTS", "Variant", "steps_of", "verdict"]

GOAL = 1.05
"""What the ratio of our time to torch's is to stay below."""


def _gpt_batch(config: GPTConfig, rank: int) -> tuple[Tensor, ...]:
    return random_batch(config, seed=rank)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained and how it is wrapped; by our class and torch's alike."""

    make: Callable[[GPTConfig], nn.Module] = GPT
    """Builds the module."""
    has_sizes: bool = True
    """Whether the module depends on the size of the GPT."""
    batch: Callable[[GPTConfig, int], tuple[Tensor, ...]] = _gpt_batch
    """The batch of a rank."""
    loss_of: Callable[[Any], Tensor] = lambda output: output
    """The loss in what forward returns."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    comm_hook: Callable[..., Any] | None = None
    """What is registered as communication hook, with no state."""


_FIND_UNUSED = {"find_unused_parameters": True}

VARIANTS: dict[str, Variant] = {
    "plain": Variant(),
    "bucket-view": Variant(switches={"gradient_as_bucket_view": True}),
    "compiled": Variant(make=lambda config: cast("nn.Module", torch.compile(GPT(config)))),
    "find-unused": Variant(switches=_FIND_UNUSED),
    "find-unused-branch": Variant(make=GPTWithUnusedBranch, switches=_FIND_UNUSED),
    "static-graph": Variant(switches={"static_graph": True}),
    "allreduce-hook": Variant(comm_hook=default_hooks.allreduce_hook),
    "fp16-hook": Variant(comm_hook=default_hooks.fp16_compress_hook),
    "batch-norm": Variant(
        make=lambda _: CNN(),
        has_sizes=False,
        batch=lambda _, rank: random_images(seed=rank),
    ),
    "500-parameters": Variant(
        make=lambda _: Chain(num_parameters=500),
        has_sizes=False,
        batch=lambda _, rank: (torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)),),
    ),
    "500-parameters-unused": Variant(
        make=lambda _: Chain(num_parameters=500),
        has_sizes=False,
        batch=lambda _, rank: (torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)),),
        switches=_FIND_UNUSED,
    ),
    "dict-output": Variant(make=GPTWithDict, loss_of=lambda output: output["loss"], switches=_FIND_UNUSED),
    "dataclass-output": Variant(
        make=GPTWithOutput, loss_of=lambda output: output.loss, switches=_FIND_UNUSED
    ),
    "dict-output-static": Variant(
        make=GPTWithDict, loss_of=lambda output: output["loss"], switches={"static_graph": True}
    ),
}


def steps_of(variant: Variant, config: GPTConfig, *, rank: int) -> dict[str, Callable[[], None]]:
    """One training step of our class, and one of torch's, each with a replica and an optimizer of its own."""
    torch.manual_seed(0)
    base = variant.make(config)
    batch = variant.batch(config, rank)
    classes: dict[str, Callable[..., nn.parallel.DistributedDataParallel]] = {
        "syncline": sl.DistributedDataParallel,
        "torch": nn.parallel.DistributedDataParallel,
    }
    return {
        name: _step_of(variant, wrap(copy.deepcopy(base), **variant.switches), batch)
        for name, wrap in classes.items()
    }


def _step_of(
    variant: Variant, module: nn.parallel.DistributedDataParallel, batch: tuple[Tensor, ...]
) -> Callable[[], None]:
    if variant.comm_hook is not None:
        module.register_comm_hook(None, variant.comm_hook)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        variant.loss_of(module(*batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def verdict(low: float, high: float) -> str:
    """Whether the goal is met, by the whole interval.

    Example:
        >>> verdict(0.9, 1.0), verdict(1.0, 1.1), verdict(1.1, 1.2)
        ('met', 'unclear', 'missed')
    """
    if high <= GOAL:
        return "met"
    return "missed" if low > GOAL else "unclear"
