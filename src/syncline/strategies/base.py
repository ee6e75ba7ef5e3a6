"""The strategy interface: pure functions of plain data decide when and how the parameters of replicas sync.

A strategy is an immutable description. Its methods take a state, and return the new state with the actions to carry
out. A strategy has no tensors, no transport and no clock. The package `strategies/execution/` calls the strategy in
every backward and after every step, and carries out the actions. Therefore the same strategy runs on every transport,
its state is a small record that can be saved as JSON, and tests need no ranks.

A strategy also states which data has to be kept for its actions, beside the module (`Mechanism`). Ranks compare the
text forms of their strategies (`in_words`) to check that all ranks were given the same strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from syncline.contract import Rules

# ---------------------------------------------------------------------- actions


class Message(NamedTuple):
    """A message that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    """The sender."""
    clock: int
    """The step that the message is about."""


class Action:
    """An operation that a strategy requests. Users cannot add actions, because the executor must know each one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReduceGradients(Action):
    """An action that averages gradients in a backward, over all ranks or over this rank's worker (a group of ranks)."""

    among: Literal["all", "worker"] = "all"


@dataclass(frozen=True, slots=True)
class Average(Action):
    """An action that replaces parameters and buffers by their mean over all ranks."""

    optimizer_state: bool = False
    """Whether to also average the floating-point state of the attached optimizers (momenta)."""
    by_weight: bool = False
    """Whether to weight the values of each rank by the push-sum weight of that rank."""


@dataclass(frozen=True, slots=True)
class AverageBuffers(Action):
    """An action that makes the buffers equal on all ranks, by the policy that the user chose for buffers."""


@dataclass(frozen=True, slots=True)
class RestartOuter(Action):
    """An action that copies the parameters, which are equal on all ranks, as the outer optimizer's new start."""


@dataclass(frozen=True, slots=True)
class SendOuter(Action):
    """An action that starts to average a fragment's outer gradient: the distance moved since its last outer step."""

    fragment: int


@dataclass(frozen=True, slots=True)
class AdvanceOuter(Action):
    """An action that starts the next phase of a fragment's average, if the encoding has several phases."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ReceiveOuter(Action):
    """An action that waits for a fragment's average, takes the outer step, and writes it into the parameters."""

    fragment: int
    mixing: float | None
    """The weight of this rank's own values in the result, from 0 to 1. None: add this rank's changes since the send."""


@dataclass(frozen=True, slots=True)
class Push(Action):
    """An action that splits values into equal parts, sends one to each rank of `to`, and adds those of `sources`."""

    to: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update(Action):
    """An action that sends the server of each shard how this rank's parameters changed in step `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class Close(Action):
    """An action that adds the mean of all updates of step `clock` to this rank's shard, and sends it to all ranks."""

    clock: int


@dataclass(frozen=True, slots=True)
class Adopt(Action):
    """An action that adopts the received values of a shard, which contain all updates up to step `clock`."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class Await(Action):
    """An action that waits until a message has arrived, and then calls the strategy's `at_step` again."""


# ---------------------------------------------------------------------- effects of actions


def sends(action: Action, *, has_buffers: bool) -> bool:
    """Return whether an action sends or receives data, for a module with or without buffers to synchronize."""
    return has_buffers if isinstance(action, AverageBuffers) else not isinstance(action, RestartOuter)


def synchronized_by(actions: Sequence[Action], *, has_buffers: bool) -> set[str]:
    """Return which of "parameters", "buffers" and "optimizer" the actions synchronize.

    Example:
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
        num_fragments: the number of fragments into which an outer optimizer divides the parameters; 0 without one.

    Example:
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
    """Return whether all ranks wait for each other while they carry out the actions.

    They do not wait if data is received in a later step than it is sent, or only between the ranks of a pair.
    """
    sent = {action.fragment for action in actions if isinstance(action, SendOuter)}
    received = {action.fragment for action in actions if isinstance(action, ReceiveOuter)}
    return bool(sent & received) or any(isinstance(action, Average) for action in actions)


def descriptions(actions: Sequence[Action], *, has_buffers: bool) -> Iterator[str]:
    """Yield a description of each action that sends or receives data, for `RoundRecord.what`.

    Example:
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


# ---------------------------------------------------------------------- data beside the module


class Mechanism:
    """The data that a strategy's actions need beside the module. Users cannot add subclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NothingKept(Mechanism):
    """The mechanism of strategies that need no data beside the module."""


@dataclass(frozen=True, slots=True)
class OuterCopies(Mechanism):
    """A second copy of the parameters, equal on all ranks, with an optimizer of its own."""

    fragments: tuple[tuple[int, ...], ...]
    """For each fragment, the indices of its parameters, which sync together."""
    outer: Any
    """A function that makes the optimizer of the copies."""
    compression: Any
    """The encoding of outer gradients; None for no encoding."""
    keeps_sent: bool
    """Whether changes made while a fragment is in flight are added to the values that arrive."""


@dataclass(frozen=True, slots=True)
class PushSumWeight(Mechanism):
    """The push-sum weight of this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """A shard of the parameters that this rank serves, and the values of all other shards."""


# ---------------------------------------------------------------------- strategies in words


def in_words(description: object) -> str:
    """Return the text of a frozen dataclass as a user would write it.

    The text has no default values, and shows functions by their qualified names.

    Example:
        >>> from syncline.strategies import LocalSGD
        >>> in_words(LocalSGD(8, warmup=100))
        'LocalSGD(every=8, warmup=100)'
    """
    shown = []
    for field in fields(description):  # type: ignore[arg-type]
        value = getattr(description, field.name)
        if value != field.default:
            shown.append(f"{field.name}={value_in_words(value)}")
    return f"{type(description).__name__}({', '.join(shown)})"


def value_in_words(value: object) -> str:
    """Return the qualified name of a function, a partial with its arguments, or any other value as Python shows it."""
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


def every_words(steps: int) -> str:
    """Return a number of steps in words, such as "every 8 steps" or "every step"."""
    return f"every {steps} steps" if steps > 1 else "every step"


# ---------------------------------------------------------------------- strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The ranks and the parameters of a run. Only `rank` differs between ranks."""

    rank: int
    num_ranks: int
    hosts: tuple[int, ...]
    """For each rank, the index of the host on which it runs."""
    sizes_numel: tuple[int, ...]
    """The number of elements of each trained parameter, in the module's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of the training on this rank."""

    step: int
    """The number of completed optimizer steps."""


State = TypeVar("State", bound=NamedTuple)


Decision = tuple[State, tuple[Action, ...]]
"""The new state of a strategy, and the actions to carry out, in this order."""


class NoState(NamedTuple):
    """The empty state of a strategy that keeps no state between steps."""


class Strategy(ABC, Generic[State]):
    """The interface of strategies, which decide when and how parameters sync.

    Subclasses are frozen dataclasses. Their states are named tuples of integers and of tuples of integers. `init`,
    `at_backward`, `at_step` and `at_sync` are pure functions.
    """

    situation_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of the state that depend on the number of ranks or on this rank. They are never loaded."""
    needs_attach: ClassVar[bool] = True
    """Whether the strategy acts after steps, so that the optimizer has to be attached."""
    drifts: ClassVar[bool] = True
    """Whether replicas may differ between two parameter syncs."""

    @abstractmethod
    def init(self, spec: Spec) -> State:
        """Return the state of the strategy before the first step.

        Raises:
            ValueError: the strategy does not fit the number of ranks, their hosts, or the parameters.
        """

    def at_backward(self, state: State, progress: Progress) -> tuple[Action, ...]:
        """Return the actions for a backward that begins now. Without an action, as by default, gradients stay local."""
        return ()

    def at_step(self, state: State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[State]:
        """Return the new state, and the actions to carry out after an optimizer step; by default no action.

        Args:
            state: the state that the last call returned.
            progress: contains the number of the step that was just completed.
            inbox: the messages that have arrived since the last call.
        """
        return state, ()

    @abstractmethod
    def at_sync(self, state: State, progress: Progress) -> Decision[State]:
        """Return the new state, and the actions of a parameter sync that the user requests outside of the schedule.

        The actions make the parameters of all ranks equal.
        """

    @abstractmethod
    def rules(self, spec: Spec) -> Rules:
        """Return the guarantees of the strategy in words, for the contract."""

    def mechanism(self, spec: Spec) -> Mechanism:
        """Return which data the strategy's actions need beside the module. By default they need no data."""
        return NothingKept()

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        """Return, for each rank, the index of the group in which it averages gradients in every step.

        None, the default, stands for no such groups.
        """
        return None

    def state_from(self, saved: Mapping[str, Any], spec: Spec) -> State:
        """Return the state from a saved `state._asdict()`, which may come from JSON or from another number of ranks."""
        state = self.init(spec)
        known = set(state._fields) - self.situation_fields
        return state._replace(**{name: _as_tuples(value) for name, value in saved.items() if name in known})

    def __str__(self) -> str:
        return in_words(self)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
