"""diverge: let replicas drift apart on purpose."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from syncline.sync.divergence import divergence_of
from syncline.verbs.common import refuse_one_copy

__all__ = ["diverge"]


def diverge(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which nothing of a wrapped module is synchronized, so that its replicas drift apart.

    Neither gradients nor buffers nor parameters are sent inside, whatever the strategy is: each rank perturbs its
    weights, trains, or evaluates by itself. After it, bring the replicas together by `sl.average_`, `sl.keep_best_` or
    `sl.broadcast_` (and the optimizer, if it has stepped): a forward whose gradients are to be reduced before they have
    met is an error on every rank, and nothing makes them equal behind your back. `docs/strategies.md` has a recipe.

    A collective call on entering.

    Args:
        module: a `sl.DistributedDataParallel`, or the module inside. Of a bare module that nothing wraps nothing is
            synchronized anyway.

    Raises:
        TypeError: not a module, or torch's own wrapper.
        ValueError: its parameters are one copy for several ranks (`sl.share_`, `sharded=True`), or it drifts already.

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with sl.diverge(ddp), torch.no_grad():
        ...     for parameter in ddp.parameters():
        ...         parameter += 0.01 * torch.randn_like(parameter)
        ...     loss = ddp(torch.ones(1, 2)).square().mean()
        >>> best = sl.keep_best_(ddp, loss, mode="min")
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got {type(module).__name__}")
    inner = module
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner = module.module
        if divergence_of(inner) is None:
            raise TypeError(
                "torch's own DistributedDataParallel synchronizes in forward and backward and cannot be told not to: "
                "wrap the module with sl.DistributedDataParallel, or use module.module inside of no_sync"
            )
    refuse_one_copy(inner)
    divergence = divergence_of(inner)
    return nullcontext() if divergence is None else divergence.drifting()
