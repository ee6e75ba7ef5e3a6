"""What an executor has to keep for a strategy's actions, beside the module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Mechanism", "NothingKept", "OuterCopies", "PushSumWeight", "ServerShard"]


class Mechanism:
    """What an executor has to keep for a strategy's actions, beside the module; its subclasses are all there are."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NothingKept(Mechanism):
    """Parameters meet as they are."""


@dataclass(frozen=True, slots=True)
class OuterCopies(Mechanism):
    """A second copy of the parameters, equal on all ranks, with an optimizer of its own."""

    fragments: tuple[tuple[int, ...], ...]
    """Indices of the parameters that meet together."""
    outer: Any
    """Makes the optimizer of the copies that it is given."""
    compression: Any
    """How outer gradients are encoded; None: not at all."""
    keeps_sent: bool
    """Whether what is learnt while a fragment is under way is added to what arrives."""


@dataclass(frozen=True, slots=True)
class PushSumWeight(Mechanism):
    """A weight that goes with this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """A shard of the parameters that this rank serves, and a view of all the others."""
