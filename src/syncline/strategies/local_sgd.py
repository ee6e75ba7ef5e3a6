"""Strategies with local steps: each rank steps alone, and the parameters sync at regular intervals.

`LocalSteps` is the base class of `LocalSGD` and `DiLoCo`, with their synchronous warm-up and their groups of ranks that
average gradients in every step. `LocalSGD` averages the parameters over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from syncline.checks import checked_count, checked_flag, did_you_mean, store, suggests_arguments
from syncline.contract import LOCAL_GRADIENTS, OWN_OPTIMIZER, Rule, Rules
from syncline.strategies.actions import Action, Average, AverageBuffers, Message, ReduceGradients
from syncline.strategies.base import Decision, Progress, Spec, State, Strategy, every_words
from syncline.words import format_count

EverythingWithin = Literal["host"] | int | None
"""The type of `every_step_within`, which selects the groups of ranks that average gradients in every step.

"host" stands for the ranks of each host, a number for groups of that many consecutive ranks, and None for no groups."""


class LocalSteps(Strategy[State]):
    """The base class of strategies whose ranks step alone between two parameter syncs.

    The first steps of the training can be a synchronous warm-up.
    """

    every: int
    """The number of steps between two parameter syncs."""
    warmup: int
    """The number of synchronous steps at the start."""
    every_step_within: EverythingWithin

    def __post_init__(self) -> None:
        every, warmup = (
            checked_count("every", self.every, at_least=1),
            checked_count("warmup", self.warmup, at_least=0),
        )
        store(self, every=every, warmup=warmup)
        within = self.every_step_within
        if isinstance(within, str):
            if within != "host":
                raise ValueError(
                    f'expected every_step_within to be "host", a number of ranks per group, or None, got {within!r}'
                    + did_you_mean(within, ("host",))
                )
        elif within is not None:
            store(self, every_step_within=checked_count("every_step_within", within, at_least=2))

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        """Return, for each rank, the index of the group in which it averages gradients in every step.

        Return None if there are no such groups.

        Raises:
            ValueError: `every_step_within` does not divide the number of ranks.

        Examples:
            >>> spec = Spec(rank=0, num_ranks=4, hosts=(0, 1, 1, 0), sizes_numel=())
            >>> [LocalSGD(8, every_step_within=within).workers(spec) for within in ("host", 2, None)]
            [(0, 1, 1, 0), (0, 0, 1, 1), None]
        """
        within = self.every_step_within
        if within is None:
            return None
        if spec.num_ranks == 1:
            return (0,)
        if within == "host":
            return spec.hosts
        if spec.num_ranks % within:
            raise ValueError(
                f"expected every_step_within to be a number that divides the {spec.num_ranks} ranks into equal groups, "
                f"got {within}. Choose a divisor of {spec.num_ranks}"
            )
        return tuple(rank // within for rank in range(spec.num_ranks))

    def at_backward(self, state: State, progress: Progress) -> tuple[Action, ...]:
        if self.every_step_within is not None:
            return (ReduceGradients("worker"),)
        return (ReduceGradients(),) if progress.step < self.warmup else ()

    @property
    def averages_gradients(self) -> bool:
        return self.warmup > 0 or self.every_step_within is not None

    @property
    def _after_warmup(self) -> str:
        """The contract's text about the start of parameter syncs, as in `, after 100 synchronous steps`.

        It is empty if there is no warm-up.
        """
        return f", after {format_count(self.warmup, 'synchronous step')}" if self.warmup else ""

    @property
    def _during_warmup(self) -> str:
        """The contract's text about buffers during the warm-up, in which they sync after every step.

        It is empty if there is no warm-up.
        """
        return "every step of the warm-up, then " if self.warmup else ""

    @property
    def _gradients_rule(self) -> Rule:
        """The contract's texts about gradients: when and how they are averaged, and how far they may differ."""
        within = self.every_step_within
        if within is not None:
            among = "the ranks of a host" if within == "host" else f"{within} ranks"
            return Rule("every backward outside no_sync", f"mean over {among}, all_reduce", "none among them")
        if self.warmup:
            return Rule(
                f"in the first {format_count(self.warmup, 'step')}", "mean, all_reduce", "afterwards local"
            )
        return LOCAL_GRADIENTS


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
        self.workers(spec)  # raises if the ranks cannot be divided
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
