"""The effects of a strategy's actions: what they send, what they make equal, and how records describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.strategies.base import (
    Action,
    Adopt,
    Average,
    AverageBuffers,
    Close,
    Push,
    ReceiveOuter,
    RestartOuter,
    SendOuter,
    Update,
)


def sends(action: Action, *, has_buffers: bool) -> bool:
    """Return whether an action sends or receives data.

    Args:
        action: the action.
        has_buffers: whether the module has buffers that are synchronized. If not, `AverageBuffers` sends nothing.
    """
    return has_buffers if isinstance(action, AverageBuffers) else not isinstance(action, RestartOuter)


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


def without_average(actions: Sequence[Action]) -> list[Action]:
    """Return the actions for tensors that are equal already: of each `Average`, only the sync of buffers remains.

    Examples:
        >>> without_average([Average(), RestartOuter()])
        [AverageBuffers(), RestartOuter()]
    """
    return [AverageBuffers() if isinstance(action, Average) else action for action in actions]


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
                yield f"sent to {_ranks(to)}, received from {_ranks(sources)}"
            case Update():
                yield "sent the updates to all servers"
            case Close(clock):
                yield f"completed step {clock} of this rank's shard"
            case Adopt(shard, clock):
                yield f"adopted shard {shard} of step {clock}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or 'none'}"
