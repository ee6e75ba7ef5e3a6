"""One training step of a small GPT, unsynchronized and by each wrapper."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.bench.models import GPT, SIZES, random_batch
from syncline.parallel import DistributedDataParallel

__all__ = ["LOCAL", "SHARDED", "can_shard", "num_parameters_of", "steps_of", "wrappers"]

LOCAL = "not synchronized"
SHARDED = "syncline, sharded"

Wrap = Callable[[nn.Module], nn.Module]


def can_shard() -> bool:
    """Whether our class takes `sharded=True`."""
    return "sharded" in inspect.signature(DistributedDataParallel.__init__).parameters


def wrappers(backend: dist.ProcessGroup | None) -> dict[str, Wrap]:
    """How each competitor wraps the module.

    Args:
        backend: a group on our torch.distributed backend, for torch's own class; None leaves it out.
    """
    theirs: Any = nn.parallel.DistributedDataParallel
    ours: Any = DistributedDataParallel
    found: dict[str, Wrap] = {
        LOCAL: lambda module: module,
        "torch DDP, gloo": lambda module: theirs(module),
        "torch DDP, gloo, bucket view": lambda module: theirs(module, gradient_as_bucket_view=True),
    }
    if backend is not None:
        found["torch DDP, backend syncline"] = lambda module: theirs(
            module, process_group=backend, gradient_as_bucket_view=True
        )
    found["syncline"] = lambda module: ours(module)
    found["syncline, bucket view"] = lambda module: ours(module, gradient_as_bucket_view=True)
    if can_shard():
        found[SHARDED] = lambda module: ours(module, sharded=True)
    return found


def steps_of(
    model: str, *, rank: int, backend: dist.ProcessGroup | None, notes: list[str]
) -> dict[str, Callable[[], None]]:
    """One step of each competitor: a replica of its own, fused AdamW, the same batch each time.

    Args:
        model: a name in `SIZES`.
        rank: seeds the batch.
        backend: as in `wrappers`.
        notes: gets the reason where a competitor cannot be had.
    """
    torch.manual_seed(0)
    base = GPT(SIZES[model])
    batch = random_batch(SIZES[model], seed=rank)
    found = {}
    for name, wrap in wrappers(backend).items():
        try:
            found[name] = _step_of(wrap(copy.deepcopy(base)), batch, attaches=name == SHARDED)
        except (ValueError, NotImplementedError) as error:
            notes.append(f"{name}: {error}")
    return found


def num_parameters_of(model: str) -> int:
    """Parameters of the GPT `model`."""
    return sum(parameter.numel() for parameter in GPT(SIZES[model]).parameters())


def _step_of(module: nn.Module, batch: tuple[torch.Tensor, ...], *, attaches: bool) -> Callable[[], None]:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    if attaches:
        optimizer = module.attach(optimizer)  # type: ignore[operator]

    def step() -> None:
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
