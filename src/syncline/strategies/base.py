"""Strategies: when and how the parameters of replicas meet, decided by pure functions of plain data.

A strategy is an immutable description. What it remembers is a state that it is handed and returns; what it wants done
is a tuple of actions. It has no tensors, no transport and no clock: `strategies/execution/` asks it at every backward
and after every step, and does what it says. So the same strategy runs on every engine, its state is a small record that
can be saved as JSON, and it is tested without any rank.

Strategies in words: by them ranks compare what they were given.

What an executor has to keep for a strategy's actions, beside the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from syncline.contract import Rules
from syncline.strategies.actions import Action, Message

__all__ = [
    "Mechanism",
    "NothingKept",
    "OuterCopies",
    "Progress",
    "PushSumWeight",
    "ServerShard",
    "Spec",
    "Strategy",
    "every_words",
    "in_words",
    "value_in_words",
]


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
    keeps_sent: bool
    """Whether what is learnt while a fragment is under way is added to what arrives."""


@dataclass(frozen=True, slots=True)
class PushSumWeight(Mechanism):
    """A weight that goes with this rank's values."""

    weight: float


@dataclass(frozen=True, slots=True)
class ServerShard(Mechanism):
    """A shard of the parameters that this rank serves, and a view of all the others."""


def in_words(description: object) -> str:
    """A frozen dataclass as a user would write it, without what has its default; callables by qualified name.

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
    """A callable by its qualified name, a partial with its arguments, anything else as Python shows it."""
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


def every_words(steps: int) -> str:
    """`every 8 steps`."""
    return f"every {steps} steps" if steps > 1 else "every step"


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


State = TypeVar("State", bound=NamedTuple)


class Strategy(ABC, Generic[State]):
    """When and how parameters meet.

    Subclasses are frozen dataclasses; `init`, `at_backward`, `at_step` and `at_meeting` are pure.
    """

    state_type: ClassVar[type[tuple[Any, ...]]]
    """The type of its state: a named tuple of integers and tuples of them."""
    situation_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of the state that follow from the number of ranks and from this rank."""
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

    def state_from(self, saved: Mapping[str, Any], spec: Spec) -> State:
        """The state that `state._asdict()` was saved of, also by way of JSON, and by another number of ranks."""
        own = {key: _as_tuples(value) for key, value in saved.items() if key not in self.situation_fields}
        return self.state_type(**self.init(spec)._asdict() | own)  # type: ignore[return-value]

    def __str__(self) -> str:
        return in_words(self)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
