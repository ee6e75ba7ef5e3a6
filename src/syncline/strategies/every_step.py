"""Synchronous training: gradients are averaged in every backward, as in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from syncline.contract import Rule, Rules
from syncline.strategies.base import Action, Message, Progress, ReduceGradients, Spec, Strategy


class _State(NamedTuple):
    """An empty state."""


@dataclass(frozen=True)
class EveryStep(Strategy[_State]):
    """Averaged gradients in every backward outside of `no_sync`, so that replicas are always equal.

    This is the default (`strategy=None`).

    Example:
        >>> strategy = EveryStep()
        >>> strategy.at_backward(_State(), Progress(step=0))
        (ReduceGradients(among='all'),)
    """

    state_type: ClassVar[type[tuple[object, ...]]] = _State
    needs_attach: ClassVar[bool] = False
    drifts: ClassVar[bool] = False

    def init(self, spec: Spec) -> _State:
        return _State()

    def at_backward(self, state: _State, progress: Progress) -> tuple[Action, ...]:
        return (ReduceGradients(),)

    def at_step(
        self, state: _State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[_State, tuple[Action, ...]]:
        return state, ()

    def at_sync(self, state: _State, progress: Progress) -> tuple[_State, tuple[Action, ...]]:
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
