"""The floating state of an optimizer, which meets when it is asked for."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from syncline.sync.optimizers import optimizer_leaves

__all__ = ["floating_state"]


def floating_state(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Momenta and the like, by name; not step counts, nor anything else of one element.

    Example:
        >>> import torch
        >>> parameter = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([parameter])
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> [name for name, _ in floating_state(optimizer)]
        ['state[0].exp_avg', 'state[0].exp_avg_sq']
    """
    return [
        (name, leaf)
        for name, leaf in optimizer_leaves(optimizer)
        if isinstance(leaf, Tensor)
        and name.startswith("state[")
        and not name.endswith(".step")
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.dim()
    ]
