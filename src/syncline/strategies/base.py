"""The strategy interface: when and how the parameters of replicas sync, decided by pure functions of plain data.

A strategy is an immutable description. Its methods take a state and return a new one, together with a tuple of actions
to carry out. A strategy has no tensors, no transport and no clock: `strategies/execution/` asks it at every backward
and after every step, and carries out its actions. Therefore the same strategy runs on every transport, its state is a
small record that can be saved as JSON, and it can be tested without ranks.

A strategy also states which data the executor has to keep for its actions (`Mechanism`). Ranks compare the text forms
of their strategies (`in_words`) to check that all were given the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from syncline.contract import Rules


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


class Mechanism:
    """The data that an executor keeps for a strategy's actions, beside the module. The set of subclasses is closed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NothingKept(Mechanism):
    """No data: parameters sync as they are."""


@dataclass(frozen=True, slots=True)
class OuterCopies(Mechanism):
    """A second copy of the parameters, equal on all ranks, with an optimizer of its own."""

    fragments: tuple[tuple[int, ...], ...]
    """For each fragment, the indices of its parameters, which sync together."""
    outer: Any
    """Makes the optimizer of the copies."""
    compression: Any
    """How outer gradients are encoded; None for no encoding."""
    keeps_sent: bool
    """Whether changes made while a fragment is in flight are added to the values that arrive."""


@dataclass(frozen=True, slots=True)
class PushSumWeight(Mechanism):
    """The push-sum weight of this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """A shard of the parameters that this rank serves, and a view of all other shards."""


def in_words(description: object) -> str:
    """Return a frozen dataclass as a user would write it, without default values; callables by qualified name.

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
    """Return a callable's qualified name, a partial with its arguments, or else the value as Python shows it."""
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


def every_words(steps: int) -> str:
    """Return "every 8 steps", or "every step"."""
    return f"every {steps} steps" if steps > 1 else "every step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The situation of a run. Only `rank` differs between ranks."""

    rank: int
    num_ranks: int
    hosts: tuple[int, ...]
    """For each rank, the number of its host."""
    sizes_numel: tuple[int, ...]
    """Number of elements of each trained parameter, in the module's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of this rank."""

    step: int
    """Number of optimizer steps completed."""


State = TypeVar("State", bound=NamedTuple)


class Strategy(ABC, Generic[State]):
    """When and how parameters sync.

    Subclasses are frozen dataclasses. `init`, `at_backward`, `at_step` and `at_sync` are pure functions.
    """

    state_type: ClassVar[type[tuple[Any, ...]]]
    """The type of the state: a named tuple of integers and tuples of them."""
    situation_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of the state that depend on the number of ranks or on this rank, and so are never loaded."""
    needs_attach: ClassVar[bool] = True
    """Whether the strategy acts at steps, so that the optimizer has to be attached."""
    drifts: ClassVar[bool] = True
    """Whether replicas may differ between two syncs."""

    @abstractmethod
    def init(self, spec: Spec) -> State:
        """Return the state before the first step.

        Raises:
            ValueError: the strategy does not fit the situation.
        """

    @abstractmethod
    def at_backward(self, state: State, progress: Progress) -> tuple[Action, ...]:
        """Return the actions for a backward that begins now; none means that gradients stay local."""

    @abstractmethod
    def at_step(
        self, state: State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[State, tuple[Action, ...]]:
        """Return the new state, and the actions to carry out in this order after a step.

        Args:
            state: the state that the last call returned.
            progress: contains the step that was just completed.
            inbox: the messages that have arrived since the last call.
        """

    @abstractmethod
    def at_sync(self, state: State, progress: Progress) -> tuple[State, tuple[Action, ...]]:
        """Return the same for a sync that the user requests outside of the schedule; it makes all ranks equal."""

    @abstractmethod
    def rules(self, spec: Spec) -> Rules:
        """Return what the strategy guarantees, in words."""

    def mechanism(self, spec: Spec) -> Mechanism:
        """Return the data, apart from the module, that the executor has to keep for the strategy's actions."""
        return NothingKept()

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        """Return, for each rank, the number of its group that averages gradients every step; None for no groups."""
        return None

    def state_from(self, saved: Mapping[str, Any], spec: Spec) -> State:
        """Return the state from a saved `state._asdict()`, which may come from JSON or from another number of ranks."""
        own = {key: _as_tuples(value) for key, value in saved.items() if key not in self.situation_fields}
        return self.state_type(**self.init(spec)._asdict() | own)  # type: ignore[return-value]

    def __str__(self) -> str:
        return in_words(self)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
