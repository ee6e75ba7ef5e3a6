"""Strategies without a state: `EveryStep` (synchronous training) and `Manual` (syncs only on request)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.contract import Rule, Rules
from syncline.strategies.actions import Action, Average, ReduceGradients
from syncline.strategies.base import Decision, NoState, Progress, Spec, Strategy


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
