"""What a strategy is told has arrived, and what it can want done: plain values."""

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
    """Something that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    clock: int


class Action:
    """One thing to do; its subclasses are all there are."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReduceGradients(Action):
    """In this backward, average gradients: over all ranks, or over those of this rank's worker."""

    among: Literal["all", "worker"] = "all"


@dataclass(frozen=True, slots=True)
class Average(Action):
    """Make parameters and buffers the mean over all ranks, now."""

    optimizer_state: bool = False
    """And the floating state of the attached optimizers (momenta)."""
    by_weight: bool = False
    """Each rank counts by its push-sum weight."""


@dataclass(frozen=True, slots=True)
class AverageBuffers(Action):
    """Make buffers equal, now."""


@dataclass(frozen=True, slots=True)
class RestartOuter(Action):
    """What the ranks have now, which is equal, is where the outer optimizer goes on from."""


@dataclass(frozen=True, slots=True)
class SendOuter(Action):
    """Begin to average a fragment's outer gradient: how far the parameters have moved since the last outer step."""

    fragment: int


@dataclass(frozen=True, slots=True)
class AdvanceOuter(Action):
    """Let an average under way go into its next phase, where its encoding has several."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ReceiveOuter(Action):
    """Take the outer step of a fragment, and write its result into the parameters."""

    fragment: int
    mixing: float | None
    """How much of this rank's own values stays: 0 for none, 1 for all; None: what was learnt since it was sent."""


@dataclass(frozen=True, slots=True)
class Push(Action):
    """Keep an equal part of this rank's values and send one to each of `to`; add up what `sources` send."""

    to: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update(Action):
    """Send each shard's server how this rank's parameters have moved in the step that was its `clock`-th."""

    clock: int


@dataclass(frozen=True, slots=True)
class Close(Action):
    """All updates of a clock are in: add their mean to this rank's shard, and send everybody its values."""

    clock: int


@dataclass(frozen=True, slots=True)
class Adopt(Action):
    """Take over a shard's values, which contain all updates up to a clock."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class Await(Action):
    """Do not go on before something has arrived; then ask again."""
