"""The actions that a strategy requests, their effects, and the data that they need beside the module (`Mechanism`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from syncline.words import describe_ranks

# ---------------------------------------------------------------------- actions


class Message(NamedTuple):
    """A message that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    """The rank that sent the message."""
    clock: int
    """For an "update", the step of the update. For "values", the last step whose updates the values contain."""


class Action:
    """An operation that a strategy requests from the driver. Users cannot add subclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReduceGradients(Action):
    """An action that averages the gradients of a backward.

    If `among` is "all", they are averaged over all ranks. If it is "worker", they are averaged over the ranks of this
    rank's group (see `Strategy.workers`).
    """

    among: Literal["all", "worker"] = "all"


@dataclass(frozen=True, slots=True)
class Average(Action):
    """An action that replaces the parameters by their mean over all ranks, and then synchronizes the buffers.

    The user's buffer policy ("average", "broadcast" or "none") determines how the buffers are synchronized.
    """

    optimizer_state: bool = False
    """Whether to also average the floating-point state of the attached optimizers, such as momenta."""
    by_weight: bool = False
    """Whether to compute a weighted mean, in which each rank's values count by the push-sum weight of that rank."""


@dataclass(frozen=True, slots=True)
class AverageBuffers(Action):
    """An action that makes the buffers equal on all ranks, by the user's buffer policy ("average" or "broadcast").

    Under the policy "none", this action does nothing.
    """


@dataclass(frozen=True, slots=True)
class RestartOuter(Action):
    """An action that copies the current parameters as the new start of the outer optimizer.

    The parameters must be equal on all ranks.
    """


@dataclass(frozen=True, slots=True)
class SendOuter(Action):
    """An action that starts to average the outer gradient of a fragment over all ranks.

    The outer gradient is the fragment's value after its last outer step minus its value now.
    """

    fragment: int


@dataclass(frozen=True, slots=True)
class AdvanceOuter(Action):
    """An action that starts the next phase of the averaging of a fragment, if the compression needs another phase."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ReceiveOuter(Action):
    """An action that waits for a fragment's average, takes the outer step, and writes the result to the parameters."""

    fragment: int
    mixing: float | None
    """The weight of this rank's own values in the written values: at least 0, and below 1.

    With None, the written values are the result of the outer step plus this rank's changes since the send."""


@dataclass(frozen=True, slots=True)
class Push(Action):
    """An action that runs a push-sum round with some other ranks.

    This rank's weighted values are split into equal parts. The rank keeps one part, sends one to each rank of `to`, and
    adds the parts that it receives from the ranks of `sources`.
    """

    to: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update(Action):
    """An action that sends each shard's server an update: the change of the shard by step `clock` of this rank."""

    clock: int


@dataclass(frozen=True, slots=True)
class Close(Action):
    """An action that adds the mean of all ranks' updates of step `clock` to this rank's shard.

    The new values of the shard are sent to all other ranks.
    """

    clock: int


@dataclass(frozen=True, slots=True)
class Adopt(Action):
    """An action that replaces this rank's values of a shard. The new values contain all updates up to step `clock`."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class Await(Action):
    """An action that waits for a message from another rank, and then calls the strategy's `at_step` again."""


# ---------------------------------------------------------------------- data beside the module


@dataclass(frozen=True, slots=True)
class OuterCopies:
    """The mechanism of DiLoCo: a second copy of the parameters, equal on all ranks, with an optimizer of its own."""

    fragments: tuple[tuple[int, ...], ...]
    """For each fragment, the indices of its parameters. All parameters of a fragment sync in the same step."""
    outer: Any
    """A function that makes the optimizer of the copies."""
    compression: Any
    """The compression of outer gradients; None if they are sent without compression."""
    keeps_sent: bool
    """Whether a rank keeps the changes that its steps make during the averaging of a fragment.

    If so, these changes are added to the fragment's new values."""
    replaces: bool = False
    """Whether each `SendOuter` is directly followed by its `ReceiveOuter`, which mixes in no values of the rank.

    If so, the mean outer gradient may be computed in the memory of the parameters."""


@dataclass(frozen=True, slots=True)
class PushSumWeight:
    """The mechanism of gossip: the push-sum weight of this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard:
    """The mechanism of a parameter server: the shard that this rank serves, and the values of all other shards."""


Mechanism = OuterCopies | PushSumWeight | ServerShard
"""The data that a strategy's actions need beside the module."""


# ---------------------------------------------------------------------- effects


def synchronized_by(actions: Sequence[Action], *, has_buffers: bool) -> set[str]:
    """Return the kinds of data that the actions synchronize: a subset of "parameters", "buffers" and "optimizer".

    Args:
        actions: the actions.
        has_buffers: whether the module has buffers that are synchronized.

    Examples:
        >>> sorted(synchronized_by([Average(optimizer_state=True)], has_buffers=False))
        ['optimizer', 'parameters']
    """
    found = set()
    for action in actions:
        if isinstance(action, Average | ReceiveOuter | Push | Close | Adopt):
            found.add("parameters")
        if isinstance(action, Average | AverageBuffers | Push) and has_buffers:
            found.add("buffers")
        if isinstance(action, Average) and action.optimizer_state:
            found.add("optimizer")
    return found


def make_equal(actions: Sequence[Action], *, num_fragments: int) -> bool:
    """Return whether the actions make all parameters equal on all ranks.

    Args:
        actions: the actions of one round.
        num_fragments: the number of fragments into which the parameters are divided for an outer optimizer. Pass 0 if
            there is no outer optimizer.

    Examples:
        >>> make_equal([ReceiveOuter(0, mixing=0)], num_fragments=2)
        False
    """
    if any(isinstance(action, Average) for action in actions):
        return True
    replaced = {
        action.fragment for action in actions if isinstance(action, ReceiveOuter) and action.mixing == 0
    }
    return 0 < num_fragments == len(replaced)


def are_blocking(actions: Sequence[Action]) -> bool:
    """Return whether the actions average parameters over all ranks, so that all ranks wait for each other.

    The result is False if the mean is received in a later step, or if ranks send only to a few others.
    """
    sent = {action.fragment for action in actions if isinstance(action, SendOuter)}
    received = {action.fragment for action in actions if isinstance(action, ReceiveOuter)}
    return bool(sent & received) or any(isinstance(action, Average) for action in actions)


def descriptions(actions: Sequence[Action], *, has_buffers: bool) -> Iterator[str]:
    """Yield a text for each action that sends or receives data. The texts become `RoundRecord.what`.

    Args:
        actions: the actions.
        has_buffers: whether the module has buffers that are synchronized.

    Examples:
        >>> list(descriptions([Push(to=(1,), sources=(2, 3))], has_buffers=False))
        ['sent to rank 1, received from ranks 2, 3']
    """
    for action in actions:
        match action:
            case Average(optimizer_state=with_state):
                what = ["parameters", *["buffers"] * has_buffers, *["optimizer state"] * with_state]
                yield f"averaged {', '.join(what)}"
            case AverageBuffers() if has_buffers:
                yield "made buffers equal"
            case SendOuter(fragment):
                yield f"sent the outer gradient of fragment {fragment}"
            case ReceiveOuter(fragment):
                yield f"took the outer step of fragment {fragment}"
            case Push(to, sources):
                parts = (("sent to", to), ("received from", sources))
                yield ", ".join(f"{verb} {describe_ranks(ranks)}" for verb, ranks in parts if ranks)
            case Update():
                yield "sent the updates to all servers"
            case Close(clock):
                yield f"completed step {clock} of this rank's shard"
            case Adopt(shard, clock):
                yield f"adopted shard {shard} of step {clock}"
