"""diverge: let replicas drift apart on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from syncline._torch.modules import uncompiled
from syncline.given import checked_kind
from syncline.sync.divergence import Divergence, divergences_around
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
        module: a `sl.DistributedDataParallel`, the module inside, or one that has such wrappers as parts. Of a bare
            module that nothing wraps nothing is synchronized anyway.

    Raises:
        TypeError: not a module, or torch's own wrapper.
        ValueError: it is a part of what is wrapped, or drifts already; or its parameters are one copy for several ranks
            (`sl.share_`, `sharded=True`).

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with sl.diverge(ddp), torch.no_grad():
        ...     for parameter in ddp.parameters():
        ...         parameter += 0.01 * torch.randn_like(parameter)
        ...     loss = ddp(torch.ones(1, 2)).square().mean()
        >>> best = sl.keep_best_(ddp, loss, mode="min")
    """
    module = uncompiled(module)
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    found = divergences_around(inner)
    for wrapper in module.modules():
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and not any(
            one.is_of(wrapper.module) for one in found
        ):
            raise TypeError(
                "torch's own DistributedDataParallel synchronizes in forward and backward and cannot be told not to: "
                "wrap the module with sl.DistributedDataParallel, or use module.module inside of no_sync"
            )
    position = {id(part): at for at, part in enumerate(inner.modules())}
    if not all(one.module_id in position for one in found):
        raise ValueError(
            f"this {type(module).__name__} is a part of a module that is wrapped as a whole: give that one"
        )
    refuse_one_copy(inner)
    return _all_drifting(sorted(found, key=lambda one: position[one.module_id]))  # as on every rank


@contextmanager
def _all_drifting(divergences: Sequence[Divergence]) -> Iterator[None]:
    with ExitStack() as stack:
        for divergence in divergences:
            stack.enter_context(divergence.drifting())
        yield
