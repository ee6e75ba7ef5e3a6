"""The interface by which lower layers recognize a wrapper and call it.

`DistributedDataParallel` is above nearly every other layer, so verbs, checkpoints and stopping cannot import it. They
use its base class, `SynchronizedModule`, and two kinds of calls: methods of `replica_of(module)`, which are internal,
and methods of the module itself, which are public and may be overridden by a subclass.

The base class is nominal on purpose. A `runtime_checkable` Protocol compares attribute names only, so any user's module
that happens to have these attributes would pass for a wrapper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.transport.base import Transport


class ReplicaProtocol(Protocol):
    """The methods of a wrapped module's `Replica` that the library calls."""

    @property
    def transport(self) -> Transport:
        """The transport between the ranks that the module is synchronized over."""

    @property
    def has_sync_state(self) -> bool:
        """Whether `sync_state_dict` of the wrapper has state of a strategy or of a compression to save."""

    @property
    def is_drifting(self) -> bool:
        """Whether ranks step their replicas differently, by a strategy, or after `sl.diverge` until they are equal."""

    @property
    def drift_reason(self) -> str:
        """The reason why replicas may differ now; "" if parameters have to be equal."""

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that must be equal on all ranks now according to the contract, by name.

        These are parameters (under a strategy that lets replicas drift, only right after a round that makes them
        equal), and buffers that were made equal since the last forward.
        """

    def refuse_sharded(self, why: str) -> None:
        """Raise ValueError if each rank steps only its shard."""

    def send_stop_vote(self, vote: StopVote, transport: Transport, *, inside_join: bool) -> VoteRoute:
        """Send a vote on stopping with synchronized backwards, if possible; return the route that it takes.

        Args:
            vote: the vote of this rank, which also receives the other ranks' votes.
            transport: the transport between the ranks that have to agree.
            inside_join: whether the wrapper is inside of `join`.

        Raises:
            SynclineError: ranks cannot wait for each other now (`ParameterServer`, between two rounds).
        """


class SynchronizedModule(ABC):
    """Base class of modules that Syncline synchronizes, by which lower layers recognize them."""

    _replica: ReplicaProtocol

    @abstractmethod
    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of synchronization, which is not part of the module's own state."""

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
