"""The interface of strategies, which decide by pure functions when and how the parameters of replicas sync.

A strategy is an immutable description. Its methods take a state, and return the new state with the actions to carry
out. A strategy has no tensors, no transport and no timer. The package `strategies/execution/` calls the strategy in
every backward and after every step, and carries out the actions. Therefore the same strategy runs on every transport,
its state is a small record that can be saved as JSON, and its tests need no ranks.

A strategy also states which data its actions need beside the module (`mechanism`). Ranks compare the texts of their
strategies (`str`) to check that all ranks use the same strategy.

The strategies without a state are here, too: `EveryStep` (synchronous training) and `Manual` (syncs only on request).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from syncline.contract import Rule, Rules
from syncline.strategies.actions import Action, Average, Mechanism, Message, ReduceGradients
from syncline.words import shortened

# ---------------------------------------------------------------------- strategies in words


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

    def mechanism(self, spec: Spec) -> Mechanism | None:
        """Return a description of the data that the strategy's actions need beside the module.

        Return None if the actions need no such data. This is the default.
        """
        return None

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
        """Return the strategy as the expression that a user would write for it.

        The text leaves out arguments that have their default values, and shows functions by their qualified names.

        Examples:
            >>> from syncline.strategies import LocalSGD
            >>> print(LocalSGD(8, warmup=100))
            LocalSGD(every=8, warmup=100)
        """
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value_in_words(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __repr__(self) -> str:
        return shortened(str(self))


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------- strategies without a state


class NoState(NamedTuple):
    """The empty state of a strategy that keeps no state between steps."""


@dataclass(frozen=True, repr=False)
class EveryStep(Strategy[NoState]):
    """The default strategy: gradients are averaged in each backward outside of `no_sync`, so replicas stay equal.

    The argument `strategy=None` selects this strategy. torch's DistributedDataParallel behaves in the same way.

    Examples:
        >>> strategy = EveryStep()
        >>> state = strategy.init(Spec(rank=0, num_ranks=2, hosts=(0, 0), sizes_numel=(10,)))
        >>> strategy.at_backward(state, Progress(step=0))
        (ReduceGradients(among='all'),)
    """

    needs_attach: ClassVar[bool] = False
    drifts: ClassVar[bool] = False

    def init(self, spec: Spec) -> NoState:
        return NoState()

    def at_backward(self, state: NoState, progress: Progress) -> tuple[Action, ...]:
        return (ReduceGradients(),)

    def at_sync(self, state: NoState, progress: Progress) -> Decision[NoState]:
        return state, ()

    def rules(self, spec: Spec) -> Rules:
        nothing = Rule("never: equal by construction", None, "none")
        return Rules(
            strategy=str(self),
            gradients=None,
            parameters=nothing,
            buffers_when="",
            buffers_drift="",
            optimizer=nothing,
            at_step="nothing sent",
        )


@dataclass(frozen=True, repr=False)
class Manual(Strategy[NoState]):
    """A strategy that never synchronizes gradients, parameters or buffers by itself.

    All ranks start with equal parameters. After that, `sl.sync_gradients_`, `sl.average_`, `sl.broadcast_` and
    `sl.keep_best_` synchronize the replicas on request. `ddp.sync_parameters_()` averages the parameters, and
    synchronizes the buffers by their policy. The optimizer need not be attached.

    Examples:
        >>> strategy = Manual()
        >>> state = strategy.init(Spec(rank=0, num_ranks=2, hosts=(0, 0), sizes_numel=(10,)))
        >>> strategy.at_backward(state, Progress(step=0))
        ()
    """

    needs_attach: ClassVar[bool] = False

    def init(self, spec: Spec) -> NoState:
        return NoState()

    def at_sync(self, state: NoState, progress: Progress) -> Decision[NoState]:
        return state, (Average(),)

    def rules(self, spec: Spec) -> Rules:
        when = "only when asked: "
        return Rules(
            strategy=str(self),
            reduces=False,
            gradients=Rule(f"{when}sl.sync_gradients_(ddp)", "mean, all_reduce", "local values differ"),
            parameters=Rule(f"{when}sl.average_(ddp), ...", "as asked", "unbounded"),
            buffers_when=f"{when}ddp.sync_parameters_(), sl.average_(ddp), ...",
            buffers_drift="unbounded",
            optimizer=Rule(
                f"{when}sl.average_(optimizer), ...", "each rank applies its own update", "unbounded"
            ),
            at_step="nothing sent: you request each sync (ddp.sync_parameters_(), sl.average_, sl.keep_best_, ...)",
        )
