"""The messages that a strategy receives and the actions that it returns: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "Action",
    "Adopt",
    "AdvanceOuter",
    "Average",
    "AverageBuffers",
    "Await",
    "Close",
    "Message",
    "Push",
    "ReceiveOuter",
    "ReduceGradients",
    "RestartOuter",
    "SendOuter",
    "Update",
]


class Message(NamedTuple):
    """A message that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    clock: int


class Action:
    """One thing to do. The set of subclasses is closed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReduceGradients(Action):
    """Average gradients in this backward, over all ranks or over the ranks of this rank's worker."""

    among: Literal["all", "worker"] = "all"


@dataclass(frozen=True, slots=True)
class Average(Action):
    """Replace parameters and buffers by their mean over all ranks, now."""

    optimizer_state: bool = False
    """Also average the floating state of the attached optimizers (momenta)."""
    by_weight: bool = False
    """Weight each rank by its push-sum weight."""


@dataclass(frozen=True, slots=True)
class AverageBuffers(Action):
    """Make the buffers equal, now."""


@dataclass(frozen=True, slots=True)
class RestartOuter(Action):
    """Start the outer optimizer again from the ranks' current parameters, which are equal."""


@dataclass(frozen=True, slots=True)
class SendOuter(Action):
    """Start to average a fragment's outer gradient: the distance that it has moved since the last outer step."""

    fragment: int


@dataclass(frozen=True, slots=True)
class AdvanceOuter(Action):
    """Move an average in flight into its next phase, if its encoding has several."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ReceiveOuter(Action):
    """Take the outer step of a fragment, and write its result into the parameters."""

    fragment: int
    mixing: float | None
    """The weight of this rank's own values: 0 for none, 1 for all. None: only changes since the send are kept."""


@dataclass(frozen=True, slots=True)
class Push(Action):
    """Split the values into equal parts: keep one, send one to each rank of `to`, add those received from `sources`."""

    to: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update(Action):
    """Send each shard's server the change of this rank's parameters in step `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class Close(Action):
    """Add the mean of all updates of a clock to this rank's shard, and send its values to all ranks."""

    clock: int


@dataclass(frozen=True, slots=True)
class Adopt(Action):
    """Adopt a shard's values, which contain all updates up to a clock."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class Await(Action):
    """Wait until a message has arrived, then ask the strategy again."""
