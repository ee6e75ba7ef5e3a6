"""What is known of modules that are wrapped: what has to be equal on all ranks, and what need not be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.sync.wrapper_protocol import replica_of

__all__ = ["Synchronization", "synchronization_of", "unwrapped"]


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """Of all the modules that a function computes with."""

    reduced: frozenset[str] = frozenset()
    """Parameters whose gradients are the same mean on all ranks after a backward."""
    exempt: frozenset[str] = frozenset()
    """Parameters and buffers that are each rank's own."""
    why_apart: str = ""
    """Why replicas may differ now; "" where they have to be equal."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of a DistributedDataParallel, torch's or Syncline's; any other is itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def synchronization_of(roots: Mapping[str, nn.Module], *, with_gradients: bool = True) -> Synchronization:
    """What is known of these modules, wrapped or not, or with wrapped ones inside.

    Args:
        roots: by the name that comes before those of their parts, as wrapped as they are.
        with_gradients: whether gradients are reduced in what is compared.

    Raises:
        ValueError: one is sharded, so that no rank has all gradients.
    """
    reduced: set[str] = set()
    exempt: set[str] = set()
    why_apart = ""
    for prefix, root in roots.items():
        for path, module in root.named_modules():
            if not isinstance(module, DistributedDataParallel):
                continue
            # The root itself is named by what is inside of it.
            parts = (prefix,) if module is root else (prefix, path, "module")
            own = {name: ".".join(filter(None, (*parts, name))) for name in module.parameters_to_ignore}
            exempt.update(own.values())
            reduced.update(
                ".".join(filter(None, (*parts, name)))
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in own
            )
            replica = replica_of(module)
            if replica is not None:
                if with_gradients:
                    replica.refuse_sharded("no rank has all gradients, so they cannot be compared")
                why_apart = replica.drift_reason or why_apart
    return Synchronization(
        reduced=frozenset(reduced if with_gradients and not why_apart else ()),
        exempt=frozenset(exempt),
        why_apart=why_apart,
    )
