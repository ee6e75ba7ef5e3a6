"""A strategy without automatic syncs: the user requests each one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from syncline.contract import Rule, Rules
from syncline.strategies.base import Action, Average, Message, Progress, Spec, Strategy


class _State(NamedTuple):
    """An empty state."""


@dataclass(frozen=True)
class Manual(Strategy[_State]):
    """No automatic syncs of gradients, parameters or buffers.

    Replicas start equal. After that, `sl.sync_gradients_`, `sl.average_`, `sl.broadcast_` and `sl.keep_best_` sync
    them on request; `ddp.sync_parameters_()` averages parameters and buffers. No optimizer has to be attached.

    Example:
        >>> Manual().at_backward(_State(), Progress(step=0))
        ()
    """

    state_type: ClassVar[type[tuple[object, ...]]] = _State
    needs_attach: ClassVar[bool] = False

    def init(self, spec: Spec) -> _State:
        return _State()

    def at_backward(self, state: _State, progress: Progress) -> tuple[Action, ...]:
        return ()

    def at_step(
        self, state: _State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[_State, tuple[Action, ...]]:
        return state, ()

    def at_sync(self, state: _State, progress: Progress) -> tuple[_State, tuple[Action, ...]]:
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
            at_step="nothing sent: Manual() leaves it to you (ddp.sync_parameters_(), sl.average_, sl.keep_best_, ...)",
        )
