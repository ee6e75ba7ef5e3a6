"""Strategies: when and how the parameters of replicas meet, decided by pure functions of plain data.

A strategy is an immutable description. What it remembers is a state that it is handed and returns; what it wants done
is a tuple of actions. It has no tensors, no transport and no clock: an executor (`syncline.rounds`) asks it at every
backward and after every step, and does what it says. So the same strategy runs on every engine, its state is a small
record that can be saved as JSON, and it is tested without any rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from syncline.contract import Rule, Rules, format_count

__all__ = [
    "Action",
    "Adopt",
    "AdvanceOuter",
    "Average",
    "AverageBuffers",
    "Await",
    "Close",
    "EverythingWithin",
    "Mechanism",
    "Message",
    "NothingKept",
    "OuterCopies",
    "Progress",
    "Push",
    "PushSumWeight",
    "ReceiveOuter",
    "ReduceGradients",
    "RestartOuter",
    "SendOuter",
    "ServerShard",
    "Spec",
    "Strategy",
    "Update",
    "checked_count",
    "checked_within",
    "every_words",
    "gradients_rule",
    "in_words",
    "value_in_words",
    "warmup_backward",
    "workers_of",
]


# ---------------------------------------------------------------------- what a strategy is told


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The situation, the same on all ranks but for `rank`."""

    rank: int
    num_ranks: int
    hosts: tuple[int, ...]
    """Of each rank, the number of the host that it is on."""
    sizes_numel: tuple[int, ...]
    """Elements of each trained parameter, in the module's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far this rank is."""

    step: int
    """Optimizer steps that are done."""


class Message(NamedTuple):
    """Something that has arrived from another rank."""

    kind: Literal["update", "values"]
    rank: int
    clock: int


# ---------------------------------------------------------------------- what it wants done


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
    mixing: float
    """How much of this rank's own values stays: 0 for none, 1 for all."""


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


# ---------------------------------------------------------------------- what its actions work on


class Mechanism:
    """What an executor has to keep for a strategy's actions, beside the module; its subclasses are all there are."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NothingKept(Mechanism):
    """Parameters meet as they are."""


@dataclass(frozen=True, slots=True)
class OuterCopies(Mechanism):
    """A second copy of the parameters, equal on all ranks, with an optimizer of its own."""

    fragments: tuple[tuple[int, ...], ...]
    """Indices of the parameters that meet together."""
    outer: Any
    """Makes the optimizer of the copies that it is given."""
    compression: Any
    """How outer gradients are encoded; None: not at all."""


@dataclass(frozen=True, slots=True)
class PushSumWeight(Mechanism):
    """A weight that goes with this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """A shard of the parameters that this rank serves, and a view of all the others."""


# ---------------------------------------------------------------------- the strategy itself

State = TypeVar("State", bound=NamedTuple)


class Strategy(ABC, Generic[State]):
    """When and how parameters meet.

    Subclasses are frozen dataclasses; `init`, `at_backward`, `at_step` and `at_meeting` are pure.
    """

    remembers: ClassVar[type[tuple[Any, ...]]]
    """What is remembered: a named tuple of integers and tuples of them."""
    needs_attach: ClassVar[bool] = True
    """Whether it acts at the step, so that the optimizer has to be attached."""
    drifts: ClassVar[bool] = True
    """Whether replicas may differ between two meetings."""

    @abstractmethod
    def init(self, spec: Spec) -> State:
        """The state before the first step.

        Raises:
            ValueError: the strategy does not fit the situation.
        """

    @abstractmethod
    def at_backward(self, state: State, progress: Progress) -> tuple[Action, ...]:
        """What a backward that begins now has to do; nothing means that gradients stay local."""

    @abstractmethod
    def at_step(
        self, state: State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[State, tuple[Action, ...]]:
        """What is to be done now that a step is done, in this order, and the state afterwards.

        Args:
            state: as the last call returned it.
            progress: with the step that has just been done.
            inbox: what has arrived since the last call.
        """

    @abstractmethod
    def at_meeting(self, state: State, progress: Progress) -> tuple[State, tuple[Action, ...]]:
        """The same for a meeting that the user asks for, out of turn; after it all ranks are equal."""

    @abstractmethod
    def rules(self, spec: Spec) -> Rules:
        """What it promises, in words."""

    def mechanism(self, spec: Spec) -> Mechanism:
        """What its actions need beside the module."""
        return NothingKept()

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        """Of each rank, the number of the group that averages gradients every step; None: there are no such groups."""
        return None

    def state_from(self, saved: Mapping[str, Any]) -> State:
        """The state that `state._asdict()` was saved of, also by way of JSON."""
        return self.remembers(**{key: _as_tuples(value) for key, value in saved.items()})  # type: ignore[return-value]

    def __str__(self) -> str:
        return in_words(self)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def in_words(description: object) -> str:
    """A frozen dataclass as a user would write it, without what has its default; callables by qualified name.

    Example:
        >>> from syncline.strategy import LocalSGD
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
    """A callable by its qualified name, a partial with its arguments, anything else as Python shows it."""
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


# ---------------------------------------------------------------------- arguments

EverythingWithin = Literal["host"] | int | None
"""Among whom gradients are averaged in every step: the ranks of a host, so many ranks in a row, or nobody."""


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """An integer that is large enough.

    Raises:
        TypeError: not an integer.
        ValueError: too small.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be an integer, got {value!r}")
    if value < at_least:
        raise ValueError(f"expected {name} to be at least {at_least}, got {value}")
    return value


def checked_within(value: object) -> None:
    """Refuse what `every_step_within` cannot be."""
    if value is None or value == "host":
        return
    if isinstance(value, str):
        raise ValueError(
            f'expected every_step_within to be "host", a number of ranks, or None; got {value!r}'
        )
    checked_count("every_step_within", value, at_least=2)


def workers_of(within: EverythingWithin, spec: Spec) -> tuple[int, ...] | None:
    """Which ranks average gradients in every step, by number of their group.

    Raises:
        ValueError: the ranks cannot be divided so.

    Example:
        >>> spec = Spec(rank=0, num_ranks=4, hosts=(0, 0, 1, 1), sizes_numel=())
        >>> workers_of("host", spec), workers_of(2, spec), workers_of(None, spec)
        ((0, 0, 1, 1), (0, 0, 1, 1), None)
    """
    if within is None:
        return None
    if within == "host":
        return spec.hosts
    if spec.num_ranks % within:
        raise ValueError(
            f"every_step_within={within} ranks, but there are {spec.num_ranks}, which is no multiple of it"
        )
    return tuple(rank // within for rank in range(spec.num_ranks))


def warmup_backward(progress: Progress, warmup: int, *, has_workers: bool) -> tuple[Action, ...]:
    """What backwards do where parameters are what meets: nothing after the warm-up, but among workers in every step."""
    if has_workers:
        return (ReduceGradients("worker"),)
    return (ReduceGradients(),) if progress.step < warmup else ()


# ---------------------------------------------------------------------- words


def every_words(steps: int) -> str:
    """`every 8 steps`."""
    return f"every {steps} steps" if steps > 1 else "every step"


def gradients_rule(within: EverythingWithin, warmup: int) -> Rule:
    """What becomes of gradients where parameters are what meets."""
    if within is not None:
        among = "the ranks of a host" if within == "host" else f"{within} ranks"
        return Rule("every backward outside no_sync", f"mean over {among}, all_reduce", "none among them")
    if warmup:
        return Rule(f"in the first {format_count(warmup, 'step')}", "mean, all_reduce", "afterwards local")
    return Rule("never: they stay local", "-", "local values differ")
