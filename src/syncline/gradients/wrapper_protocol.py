"""The interface by which lower layers recognize a wrapper and call it.

`DistributedDataParallel` is above nearly every other layer, so the lower layers cannot import it. These include the
verbs, the checkpoints, and the code that stops a run. They import its base class `SynchronizedModule` instead. They
call internal methods of `replica_of(module)`, and public methods of the module itself, which a subclass may override.

A `runtime_checkable` Protocol would compare attribute names only. Then any user's module with attributes of these names
would count as a wrapper. A base class is therefore used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from syncline.gradients.riders.requests import StopVote
from syncline.transport.base import Transport


class ReplicaProtocol(Protocol):
    """The methods of a wrapper's `Replica` that lower layers call."""

    @property
    def transport(self) -> Transport:
        """The transport between the ranks that have replicas of the module."""

    @property
    def has_sync_state(self) -> bool:
        """Whether a strategy or a compression has state to save. The wrapper's `sync_state_dict` returns this state."""

    @property
    def is_drifting(self) -> bool:
        """Whether replicas are allowed to differ, now or later.

        This is so under some strategies, and after `sl.diverge` until the replicas are equal again.
        """

    @property
    def drift_reason(self) -> str:
        """The reason why replicas are allowed to differ now; an empty string if all parameters must be equal."""

    def equal_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that must now be equal on all ranks according to the contract, each with its name.

        These are the parameters, and the buffers if they were made equal after the last forward. Under a strategy that
        lets replicas drift, parameters are included only directly after a parameter sync that makes them equal.
        """

    def refuse_sharded(self, why: str) -> None:
        """Check that the module was wrapped without `sharded=True`.

        Args:
            why: a clause for the error message, which states why the module must not be sharded.

        Raises:
            ValueError: the module was wrapped with `sharded=True`.
        """

    def send_stop_vote(self, vote: StopVote, transport: Transport) -> bool:
        """Let the next synchronized backwards carry a vote on stopping, if possible. Return whether it is possible.

        Args:
            vote: the vote of this rank, which also receives the other ranks' votes.
            transport: the transport between the ranks that have to agree.

        Raises:
            SynclineError: the ranks cannot wait for each other now, because they serve parameters (`ParameterServer`).
        """


class SynchronizedModule(ABC):
    """The base class of wrappers, by which lower layers recognize modules that Syncline synchronizes."""

    _replica: ReplicaProtocol

    @abstractmethod
    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy and the compression, which `state_dict` of the module does not contain."""

    @abstractmethod
    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `sync_state_dict` returned."""


def replica_of(module: object) -> ReplicaProtocol | None:
    """Return the replica of one of Syncline's wrappers.

    Returns None for any other object, such as torch's own wrapper.

    Examples:
        >>> import torch
        >>> replica_of(torch.nn.Linear(2, 1)) is None
        True
    """
    if not isinstance(module, SynchronizedModule):
        return None
    replica: ReplicaProtocol | None = vars(module).get("_replica")  # None while the wrapper is constructed
    return replica
