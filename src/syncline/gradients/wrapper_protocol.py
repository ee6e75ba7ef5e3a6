"""The interface by which lower layers recognize a wrapper and call it.

`DistributedDataParallel` is above nearly every other layer, so verbs, checkpoints and stopping cannot import it.
Instead they import its base class, `SynchronizedModule`. They call methods of `replica_of(module)`, which are internal,
and methods of the module itself, which are public and may be overridden by a subclass.

A `runtime_checkable` Protocol would compare attribute names only, so any user's module with attributes of these names
would pass for a wrapper. Therefore a base class is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from syncline.gradients.riders.stop import StopVote, VoteRoute
from syncline.transport.base import Transport


class ReplicaProtocol(Protocol):
    """The methods of a wrapper's `Replica` that lower layers call."""

    @property
    def transport(self) -> Transport:
        """The transport between the ranks that the module is synchronized over."""

    @property
    def has_sync_state(self) -> bool:
        """Whether a strategy or a compression has state to save, which `sync_state_dict` of the wrapper returns."""

    @property
    def is_drifting(self) -> bool:
        """Whether ranks may step their replicas differently.

        They may under some strategies, and after `sl.diverge` until the replicas are equal again.
        """

    @property
    def drift_reason(self) -> str:
        """The reason why replicas may differ now; an empty string if parameters must be equal on all ranks."""

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors that must now be equal on all ranks according to the contract.

        These are the parameters and the buffers that were made equal since the last forward. Under a strategy that lets
        replicas drift, parameters are included only directly after a parameter sync that makes them equal.
        """

    def refuse_sharded(self, why: str) -> None:
        """Check that the module was wrapped without `sharded=True`.

        Args:
            why: the reason why shards are refused, for the message.

        Raises:
            ValueError: the module was wrapped with `sharded=True`.
        """

    def send_stop_vote(self, vote: StopVote, transport: Transport, *, inside_join: bool) -> VoteRoute:
        """Send a vote on stopping with synchronized backwards, if possible; return the route of the vote.

        Args:
            vote: the vote of this rank, which also receives the other ranks' votes.
            transport: the transport between the ranks that have to agree.
            inside_join: whether the wrapper is inside of `join`.

        Raises:
            SynclineError: ranks cannot wait for each other now (`ParameterServer`, between two rounds).
        """


class SynchronizedModule(ABC):
    """The base class of modules that Syncline synchronizes, by which lower layers recognize such modules."""

    _replica: ReplicaProtocol

    @abstractmethod
    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of synchronization, which `state_dict` of the module does not contain."""

    @abstractmethod
    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `sync_state_dict` returned."""


def replica_of(module: object) -> ReplicaProtocol | None:
    """Return the replica behind one of Syncline's wrappers; None for any other object, such as torch's own wrapper.

    Example:
        >>> import torch
        >>> replica_of(torch.nn.Linear(2, 1)) is None
        True
    """
    if not isinstance(module, SynchronizedModule):
        return None
    replica: ReplicaProtocol | None = vars(module).get("_replica")  # None while the wrapper is constructed
    return replica
