"""`Kept`: the interface of the data that a strategy's actions need in addition to the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from syncline.strategies.actions import Action, Message
from syncline.transport.base import Transport


class Kept:
    """The data of one rank that a strategy's actions need in addition to the module.

    This base class is for strategies that need no such data. Subclasses keep data, and carry out actions on it.
    """

    name: ClassVar[str] = ""
    """The key under which the data is saved; empty if there is no data to save."""
    has_copies: ClassVar[bool] = False
    """Whether the data contains a copy of the parameters.

    If so, the parameters must be equal on all ranks when the copy is made."""
    serves: ClassVar[bool] = False
    """Whether each rank is the server of a shard of the parameters, so that messages can arrive at any time."""
    num_fragments: int = 0
    """The number of fragments into which the parameters are divided for an outer optimizer; 0 if there is none."""
    optimizer: Optimizer | None = None
    """The outer optimizer, or None if there is none."""
    lanes: Sequence[Transport] = ()
    """The lanes that this object has opened. They have to be closed together with the wrapper."""

    @property
    def closed_up_to(self) -> int:
        """The last step of which the values of all shards contain the updates by all ranks; 0 without a server."""
        return 0

    @property
    def is_settled(self) -> bool:
        """Whether no update is in flight, so that a state can be saved or loaded now."""
        return True

    def start(self) -> None:
        """Copy the current parameters as the starting point. They must be equal on all ranks."""

    def restart(self) -> None:
        """Start again from the current parameters, after a call such as `sl.broadcast_` has made them equal."""

    def run(self, action: Action) -> None:
        """Carry out one action of the strategy on the kept data."""
        raise AssertionError(
            f"the strategy's action {action} needs data that its mechanism() does not provide. Let mechanism() return "
            "the mechanism that belongs to this action, for example OuterCopies for SendOuter"
        )

    def poll(self) -> Sequence[Message]:
        """Return the messages from other ranks that have arrived since the last call."""
        return ()

    def wait(self) -> Sequence[Message]:
        """Wait until a message from another rank has arrived. Return all messages that have arrived."""
        raise AssertionError(
            "expected the strategy's mechanism() to return ServerShard(), got another mechanism. The strategy's action "
            "Await() waits for the messages of a parameter server"
        )

    def write(self) -> None:
        """Write the values that this rank has received in this round into the parameters."""

    def finish(self) -> None:
        """Wait until all sends of this rank have completed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the data as a state that can be saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
