"""What `Average` needs beside an all_reduce: weights, and the floating state of optimizers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from syncline.sync.optimizers import optimizer_leaves
from syncline.sync.reduction import TensorReducer
from syncline.transport.base import Transport

__all__ = ["average_weighted", "floating_state"]

_WEIGHT = struct.Struct("<d")


def average_weighted(tensors: Sequence[Tensor], weight: float, transport: Transport) -> None:
    """Make tensors their weighted mean over ranks. A collective call.

    Args:
        tensors: floating, the same on all ranks.
        weight: of this rank, above 0.
        transport: between the ranks.
    """
    rows = transport.all_gather_bytes(_WEIGHT.pack(weight))
    share = weight / sum(_WEIGHT.unpack(row)[0] for row in rows)
    TensorReducer(tensors, transport, "sum", share=share, rounds_once=True).run()


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
