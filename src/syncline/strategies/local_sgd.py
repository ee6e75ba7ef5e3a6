"""Local SGD: each rank steps alone, and the parameters are averaged every so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from syncline.checks import checked_count, checked_flag, store
from syncline.contract import Rule, Rules
from syncline.strategies.base import (
    Action,
    Average,
    AverageBuffers,
    Message,
    Progress,
    Spec,
    Strategy,
    every_words,
)
from syncline.strategies.workers import (
    OWN_OPTIMIZER,
    EverythingWithin,
    after_warmup,
    checked_within,
    gradients_rule,
    warmup_backward,
    warmup_words,
    workers_of,
)
from syncline.words import format_count


class _State(NamedTuple):
    is_one_worker: bool
    """Whether there is only one rank, so that nothing has to be averaged."""
    has_workers: bool
    """Whether groups of ranks average gradients in every step."""


@dataclass(frozen=True)
class LocalSGD(Strategy[_State]):
    """Local steps, and every `every` steps an average of parameters and buffers over all ranks.

    It sends `every` times less than averaging gradients in every backward. With `warmup`, the first steps average
    gradients as usual (post-local SGD, Lin et al. 2018, arXiv 1808.07217), because drifting replicas cost most early
    on. Local SGD itself: Stich 2018, arXiv 1805.09767. The optimizer has to be attached.

    Args:
        every: steps between two parameter syncs.
        warmup: number of synchronous steps at the start.
        every_step_within: average gradients in every step among the ranks of each host ("host"), or in groups of so
            many consecutive ranks; parameters still sync over all ranks every `every` steps. None: no such groups.
        optimizer_state: also average floating optimizer state (momenta) at each sync. Otherwise each rank keeps its
            own.

    Raises:
        TypeError, ValueError: a number is not an integer, or too small.

    Example:
        >>> strategy = LocalSGD(every=2)
        >>> spec = Spec(rank=0, num_ranks=4, hosts=(0, 0, 0, 0), sizes_numel=(10,))
        >>> state = strategy.init(spec)
        >>> [strategy.at_step(state, Progress(step=step))[1] for step in (1, 2)]
        [(), (Average(optimizer_state=False, by_weight=False),)]
    """

    state_type: ClassVar[type[tuple[object, ...]]] = _State
    situation_fields: ClassVar[frozenset[str]] = frozenset({"is_one_worker", "has_workers"})

    every: int
    warmup: int = 0
    every_step_within: EverythingWithin = None
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        store(
            self,
            every=checked_count("every", self.every, at_least=1),
            warmup=checked_count("warmup", self.warmup, at_least=0),
            every_step_within=checked_within(self.every_step_within),
            optimizer_state=checked_flag("optimizer_state", self.optimizer_state),
        )

    def init(self, spec: Spec) -> _State:
        has_workers = workers_of(self.every_step_within, spec) is not None
        return _State(is_one_worker=spec.num_ranks == 1, has_workers=has_workers)

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        return workers_of(self.every_step_within, spec)

    def at_backward(self, state: _State, progress: Progress) -> tuple[Action, ...]:
        return warmup_backward(progress, self.warmup, has_workers=state.has_workers)

    def at_step(
        self, state: _State, progress: Progress, inbox: Sequence[Message] = ()
    ) -> tuple[_State, tuple[Action, ...]]:
        since = progress.step - self.warmup
        if since <= 0 and not state.has_workers and not state.is_one_worker:
            return state, (AverageBuffers(),)  # averaged gradients do not make buffers equal
        # Groups that average gradients separately must sync with the others at every step of the warm-up.
        is_due = since <= 0 or since % self.every == 0
        return self.at_sync(state, progress) if is_due else (state, ())

    def at_sync(self, state: _State, progress: Progress) -> tuple[_State, tuple[Action, ...]]:
        if state.is_one_worker:
            return state, ()
        return state, (Average(optimizer_state=self.optimizer_state),)

    def rules(self, spec: Spec) -> Rules:
        often = every_words(self.every)
        after = after_warmup(self.warmup)
        drift = format_count(self.every, "step")
        state_rule = Rule(often, "mean, all_reduce", drift)
        return Rules(
            equal_after_sync=True,
            strategy=str(self),
            gradients=gradients_rule(self.every_step_within, self.warmup),
            parameters=Rule(f"{often}{after}", "mean, all_reduce", drift),
            buffers_when=f"{warmup_words(self.warmup)}{often}, with the parameters",
            buffers_drift=drift,
            optimizer=state_rule if self.optimizer_state else OWN_OPTIMIZER,
            at_step=(
                f"{often}{after}: parameters (and buffers, by their policy) become the mean over "
                f"{spec.num_ranks} ranks; else nothing sent"
            ),
        )
