"""The interface of the data that a strategy's actions need beside the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from syncline.strategies.base import Action, Message
from syncline.transport.base import Transport


class Kept:
    """The data of one rank that a strategy's actions need beside the module. This class itself keeps no data.

    Subclasses carry out the actions on their data.
    """

    name: ClassVar[str] = ""
    """The name under which the state is saved; empty if there is no state."""
    has_copies: ClassVar[bool] = False
    """Whether there is a second copy of the parameters, which has to start from equal parameters."""
    serves: ClassVar[bool] = False
    """Whether each rank serves a part of the parameters, and so may receive messages at any time."""
    num_fragments: int = 0
    """The number of fragments into which an outer optimizer divides the parameters; 0 without one."""
    optimizer: Optimizer | None = None
    """The outer optimizer, if there is one."""
    lanes: Sequence[Transport] = ()
    """The lanes that were opened, to be closed once this object is no longer needed."""

    @property
    def is_settled(self) -> bool:
        """Whether no message is in flight that a saved state would lack."""
        return True

    def start(self) -> None:
        """Copy the current parameters, which are equal on all ranks, as the values that the next step starts from."""

    def restart(self) -> None:
        """Take over the current parameters, into which a verb has written equal values on all ranks."""

    def run(self, action: Action) -> None:
        """Carry out one action of the strategy on the kept data."""
        raise AssertionError(f"the strategy's mechanism() does not provide the data for its action {action}")

    def poll(self) -> Sequence[Message]:
        """Return the messages from other ranks that have arrived since the last call."""
        return ()

    def wait(self) -> Sequence[Message]:
        """Wait until a message from another rank has arrived. Return all messages that have arrived."""
        raise AssertionError("Await() needs a strategy whose mechanism() returns ServerShard()")

    def write(self) -> None:
        """Write the values received in this round into the parameters."""

    def finish(self) -> None:
        """Wait until all messages that this rank sent have arrived."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the kept data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
