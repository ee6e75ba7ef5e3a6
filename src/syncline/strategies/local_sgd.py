"""Local SGD: each rank steps alone, and the parameters are averaged over all ranks at regular intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from syncline.checks import checked_flag
from syncline.contract import Rule, Rules
from syncline.strategies.base import (
    Average,
    AverageBuffers,
    Decision,
    Message,
    Progress,
    Spec,
    every_words,
)
from syncline.strategies.local_steps import OWN_OPTIMIZER, EverythingWithin, LocalSteps, workers_of
from syncline.suggestions import suggests_arguments
from syncline.words import format_count


class _State(NamedTuple):
    is_one_worker: bool
    """Whether there is only one rank, so that nothing has to be averaged."""


@suggests_arguments
@dataclass(frozen=True, repr=False)
class LocalSGD(LocalSteps[_State]):
    """A strategy under which ranks step alone, and average their parameters over all ranks every `every` steps.

    Buffers are synchronized together with the parameters, by their own policy. LocalSGD syncs `every` times less often
    than training that averages gradients in every backward. With `warmup`, the first steps average gradients as usual
    (post-local SGD, Lin et al. 2018, arXiv 1808.07217), because differences between replicas do most harm at the start.
    Local SGD was proposed by Stich 2018, arXiv 1805.09767. The optimizer has to be attached.

    Args:
        every: the number of steps between two parameter syncs.
        warmup: the number of synchronous steps at the start.
        every_step_within: "host" to average gradients in every step among the ranks of each host; a number n to do so
            in groups of n consecutive ranks; None for no such groups. Parameters still sync over all ranks every
            `every` steps.
        optimizer_state: True to also average floating-point optimizer state, such as momenta, at each sync. If
            False, each rank keeps its own state.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of bounds.

    Examples:
        >>> strategy = LocalSGD(every=2)
        >>> spec = Spec(rank=0, num_ranks=4, hosts=(0, 0, 0, 0), sizes_numel=(10,))
        >>> state = strategy.init(spec)
        >>> [strategy.at_step(state, Progress(step=step))[1] for step in (1, 2)]
        [(), (Average(optimizer_state=False, by_weight=False),)]
    """

    situation_fields: ClassVar[frozenset[str]] = frozenset({"is_one_worker"})

    every: int
    warmup: int = 0
    every_step_within: EverythingWithin = None
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_flag("optimizer_state", self.optimizer_state)

    def init(self, spec: Spec) -> _State:
        workers_of(self.every_step_within, spec)  # raises if the ranks cannot be divided
        return _State(is_one_worker=spec.num_ranks == 1)

    def at_step(self, state: _State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[_State]:
        since = progress.step - self.warmup
        if since <= 0 and self.every_step_within is None and not state.is_one_worker:
            return state, (AverageBuffers(),)  # averaged gradients do not make buffers equal
        # Groups that average gradients separately must sync with each other at every step of the warm-up.
        is_due = since <= 0 or since % self.every == 0
        return self.at_sync(state, progress) if is_due else (state, ())

    def at_sync(self, state: _State, progress: Progress) -> Decision[_State]:
        return state, () if state.is_one_worker else (Average(optimizer_state=self.optimizer_state),)

    def rules(self, spec: Spec) -> Rules:
        often = every_words(self.every)
        drift = format_count(self.every, "step")
        state_rule = Rule(often, "mean, all_reduce", drift)
        return Rules(
            equal_after_sync=True,
            strategy=str(self),
            gradients=self._gradients_rule,
            parameters=Rule(f"{often}{self._after_warmup}", "mean, all_reduce", drift),
            buffers_when=f"{self._during_warmup}{often}, with the parameters",
            buffers_drift=drift,
            optimizer=state_rule if self.optimizer_state else OWN_OPTIMIZER,
            at_step=(
                f"{often}{self._after_warmup}: parameters (and buffers, by their policy) become the mean over "
                f"{spec.num_ranks} ranks; else nothing sent"
            ),
        )
