"""The interface of strategies, which decide by pure functions when and how the parameters of replicas sync.

A strategy is an immutable description. Its methods take a state, and return the new state with the actions to carry
out. A strategy has no tensors, no transport and no timer. The package `strategies/execution/` calls the strategy in
every backward and after every step, and carries out the actions. Therefore the same strategy runs on every transport,
its state is a small record that can be saved as JSON, and its tests need no ranks.

A strategy also states which data its actions need beside the module (`Mechanism`). Ranks compare the texts of their
strategies (`in_words`) to check that all ranks use the same strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from syncline.contract import Rules
from syncline.words import shortened

# ---------------------------------------------------------------------- actions


class Message(NamedTuple):
    """A message that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    """The rank that sent the message."""
    clock: int
    """For an "update", the step of the update. For "values", the last step whose updates the values contain."""


class Action:
    """An operation that a strategy requests from the executor. Users cannot add subclasses."""

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


class Mechanism:
    """The data that a strategy's actions need beside the module. Users cannot add subclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NothingKept(Mechanism):
    """The mechanism of a strategy whose actions need no data beside the module."""


@dataclass(frozen=True, slots=True)
class OuterCopies(Mechanism):
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
class PushSumWeight(Mechanism):
    """The mechanism of gossip: the push-sum weight of this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """The mechanism of a parameter server: the shard that this rank serves, and the values of all other shards."""


# ---------------------------------------------------------------------- strategies in words


def in_words(description: object) -> str:
    """Return a strategy (or another frozen dataclass) as the expression that a user would write for it.

    The text leaves out arguments that have their default values, and shows functions by their qualified names.

    Examples:
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
    """Return the text of one argument of a strategy.

    A function is shown by its qualified name, and a functools.partial as a call. A string is shown in quotation marks,
    and any other value by `str`.
    """
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


def every_words(steps: int) -> str:
    """Return an interval between syncs in words, such as "every 8 steps" or "every step"."""
    return f"every {steps} steps" if steps > 1 else "every step"


# ---------------------------------------------------------------------- strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The ranks and the parameter sizes of a run. All fields except `rank` are equal on all ranks."""

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
"""The new state of a strategy, and the actions to carry out. They are carried out in the order of the tuple."""


class NoState(NamedTuple):
    """The empty state of a strategy that keeps no state between steps."""


class Strategy(ABC, Generic[State]):
    """The interface of strategies, which decide when and how parameters sync.

    Subclasses are frozen dataclasses. Their states are named tuples of integers and of tuples of integers. `init`,
    `at_backward`, `at_step` and `at_sync` are pure functions.
    """

    situation_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of the state that depend on the rank or on the number of ranks. They are not loaded from a save."""
    needs_attach: ClassVar[bool] = True
    """Whether the optimizer has to be attached, because the strategy acts after optimizer steps."""
    drifts: ClassVar[bool] = True
    """Whether the parameters can differ between ranks until the next parameter sync."""

    @abstractmethod
    def init(self, spec: Spec) -> State:
        """Return the state of the strategy before the first step.

        Raises:
            ValueError: the strategy is impossible with this number of ranks, these hosts, or these parameters.
        """

    def at_backward(self, state: State, progress: Progress) -> tuple[Action, ...]:
        """Return the actions for a backward that begins now. By default there is no action, so gradients stay local."""
        return ()

    def at_step(self, state: State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[State]:
        """Return the new state, and the actions to carry out after an optimizer step. By default there is no action.

        Args:
            state: the current state of the strategy.
            progress: contains the number of the step that was just completed.
            inbox: the messages that have arrived since the last call.
        """
        return state, ()

    @abstractmethod
    def at_sync(self, state: State, progress: Progress) -> Decision[State]:
        """Return the new state, and the actions to carry out when the user calls `ddp.sync_parameters_()`.

        After these actions, the parameters are equal on all ranks.
        """

    def at_change(self, state: State, progress: Progress, spec: Spec) -> Decision[State]:
        """Return the new state, and the actions to carry out, after ranks were lost or have joined.

        Nothing is in flight then. After these actions, the parameters are equal on all ranks. By default the state is
        loaded as if it had been saved, and the actions are those of `at_sync`.

        Args:
            state: the state of one of the ranks, which is the same on all of them.
            progress: contains the number of completed steps, which is the same on all ranks.
            spec: the ranks from now on.
        """
        return self.at_sync(self.state_from(state._asdict(), spec), progress)

    @property
    def averages_gradients(self) -> bool:
        """Whether some backwards average gradients. By default, whether `at_backward` was overridden."""
        return type(self).at_backward is not Strategy.at_backward

    @abstractmethod
    def rules(self, spec: Spec) -> Rules:
        """Return the contract's texts about the strategy: what is synchronized, when, how, and how far it may drift."""

    def mechanism(self, spec: Spec) -> Mechanism:
        """Return a description of the data that the strategy's actions need beside the module.

        By default, the actions need no such data.
        """
        return NothingKept()

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        """Return, for each rank, the index of the group in which it averages gradients in every step.

        Return None if there are no such groups. This is the default.
        """
        return None

    def state_from(self, saved: Mapping[str, Any], spec: Spec) -> State:
        """Return the state of the strategy for a run that continues from a saved state.

        Args:
            saved: the saved `state._asdict()`. It may have been read from JSON, and saved by another number of ranks.
            spec: the ranks and parameters of this run.
        """
        state = self.init(spec)
        known = set(state._fields) - self.situation_fields
        return state._replace(**{name: _as_tuples(value) for name, value in saved.items() if name in known})

    def __str__(self) -> str:
        return in_words(self)

    def __repr__(self) -> str:
        return shortened(str(self))


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
