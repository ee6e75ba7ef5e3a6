"""The common base of LocalSGD and DiLoCo: a synchronous warm-up, and groups that average gradients in every step."""

from __future__ import annotations

from typing import Literal

from syncline.checks import checked_count, did_you_mean, store
from syncline.contract import Rule
from syncline.strategies.base import Action, Progress, ReduceGradients, Spec, State, Strategy
from syncline.words import format_count

EverythingWithin = Literal["host"] | int | None
"""The type of `every_step_within`, which selects the groups of ranks that average gradients in every step.

"host" stands for the ranks of each host, a number for groups of that many consecutive ranks, and None for no groups."""

LOCAL_GRADIENTS = Rule("never: they stay local", None, "local values differ")
"""The contract's texts about gradients that are never averaged."""

OWN_OPTIMIZER = Rule("never", "each rank applies its own update and keeps its own state", "unbounded")
"""The contract's texts about optimizers whose state differs between ranks, because replicas drift."""


def workers_of(within: EverythingWithin, spec: Spec) -> tuple[int, ...] | None:
    """Return, for each rank, the index of the group in which it averages gradients in every step.

    Args:
        within: "host" for one group per host, a number for groups of that many consecutive ranks, or None for no
            groups.
        spec: the ranks of the run.

    Returns:
        The indices in rank order, or None if `within` is None.

    Raises:
        ValueError: `within` does not divide the number of ranks.

    Examples:
        >>> spec = Spec(rank=0, num_ranks=4, hosts=(0, 0, 1, 1), sizes_numel=())
        >>> workers_of("host", spec), workers_of(2, spec), workers_of(None, spec)
        ((0, 0, 1, 1), (0, 0, 1, 1), None)
    """
    if within is None:
        return None
    if spec.num_ranks == 1:
        return (0,)
    if within == "host":
        return spec.hosts
    if spec.num_ranks % within:
        raise ValueError(
            f"expected every_step_within to be a number that divides the {spec.num_ranks} ranks into equal groups, got "
            f"{within}. Choose a divisor of {spec.num_ranks}"
        )
    return tuple(rank // within for rank in range(spec.num_ranks))


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
        store(
            self,
            every=checked_count("every", self.every, at_least=1),
            warmup=checked_count("warmup", self.warmup, at_least=0),
            every_step_within=_checked_within(self.every_step_within),
        )

    def workers(self, spec: Spec) -> tuple[int, ...] | None:
        return workers_of(self.every_step_within, spec)

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


def _checked_within(value: object) -> EverythingWithin:
    """Return the argument `every_step_within` if it is "host", None, or an integer of at least 2.

    Raises:
        TypeError, ValueError: the value is invalid.
    """
    if value is None or value == "host":
        return value
    if isinstance(value, str):
        raise ValueError(
            f'expected every_step_within to be "host", a number of ranks per group, or None, got {value!r}'
            + did_you_mean(value, ("host",))
        )
    return checked_count("every_step_within", value, at_least=2)
