"""How code below the wrapper finds it, and what it may ask of it.

`DistributedDataParallel` stands above nearly everything, so verbs, checkpoints and stopping cannot import it. They
know its base class, `SynchronizedModule`, and call what stands here: `replica_of(module)` for what the library asks,
and the public methods that a subclass may override on the module itself.

The base class is nominal on purpose. A `runtime_checkable` Protocol looks for attributes by name, and would take any
module of a user's that happens to have them for a wrapper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.transport.base import Transport

__all__ = ["ReplicaProtocol", "SynchronizedModule", "replica_of"]


class ReplicaProtocol(Protocol):
    """What the library asks of a wrapped module's `Replica`."""

    @property
    def transport(self) -> Transport:
        """The transport between the ranks that the module is synchronized over."""

    @property
    def has_sync_state(self) -> bool:
        """Whether `sync_state_dict` of the wrapper has anything to save: of a strategy, or of a compression."""

    @property
    def is_drifting(self) -> bool:
        """Whether ranks step their replicas differently: by a strategy, or since `sl.diverge` until they are equal."""

    @property
    def drift_reason(self) -> str:
        """The reason why replicas may differ now; "" where parameters have to be equal."""

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the contract says are equal on all ranks at this moment, by name.

        Parameters (under a strategy that lets replicas drift: right after a round that makes them equal), and buffers
        that were made equal since the last forward.
        """

    def refuse_sharded(self, why: str) -> None:
        """Raise ValueError if each rank steps its shard only."""

    def send_stop_vote(self, vote: StopVote, transport: Transport, *, inside_join: bool) -> VoteRoute:
        """Let synchronized backwards carry a vote on stopping; return how the vote travels.

        Args:
            vote: sent, and filled in with the other ranks' votes.
            transport: between the ranks that have to agree.
            inside_join: whether the wrapper is inside of `join`.

        Raises:
            SynclineError: ranks cannot wait for each other now (`ParameterServer`, between two rounds).
        """


class SynchronizedModule(ABC):
    """Base class of modules that Syncline synchronizes, by which code below the wrapper recognizes them."""

    _replica: ReplicaProtocol

    @abstractmethod
    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of synchronization beside the module's own."""

    @abstractmethod
    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `sync_state_dict` returned."""


def replica_of(module: object) -> ReplicaProtocol | None:
    """Return the replica of a module that Syncline wraps; None for any other object, torch's own wrapper included.

    Example:
        >>> import torch
        >>> replica_of(torch.nn.Linear(2, 1)) is None
        True
    """
    if not isinstance(module, SynchronizedModule):
        return None
    found: ReplicaProtocol | None = vars(module).get("_replica")  # None while it is being constructed
    return found
