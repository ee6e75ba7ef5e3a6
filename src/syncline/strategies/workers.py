"""Groups of ranks that average gradients in every step, and the gradient rules of strategies that sync parameters."""

from __future__ import annotations

from typing import Literal

from syncline.checks import checked_count, did_you_mean
from syncline.contract import Rule
from syncline.strategies.base import Action, Progress, ReduceGradients, Spec
from syncline.words import format_count

EverythingWithin = Literal["host"] | int | None
"""Which ranks average gradients in every step: those of a host, groups of so many consecutive ranks, or none."""


def checked_within(value: object) -> EverythingWithin:
    """Check `every_step_within`.

    Raises:
        TypeError, ValueError: not a valid value.
    """
    if value is None or value == "host":
        return value
    if isinstance(value, str):
        raise ValueError(
            f'expected every_step_within to be "host", a number of ranks, or None, got {value!r}'
            + did_you_mean(value, ("host",))
        )
    return checked_count("every_step_within", value, at_least=2)


OWN_OPTIMIZER = Rule("never", "each rank applies its own update and keeps its own state", "unbounded")
"""The rule for optimizers where replicas drift."""


def workers_of(within: EverythingWithin, spec: Spec) -> tuple[int, ...] | None:
    """Return, for each rank, the number of the group in which it averages gradients in every step.

    Raises:
        ValueError: the ranks cannot be divided into such groups.

    Example:
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
            f"every_step_within={within} ranks, but there are {spec.num_ranks}, which is not a multiple of it"
        )
    return tuple(rank // within for rank in range(spec.num_ranks))


def warmup_backward(progress: Progress, warmup: int, *, has_workers: bool) -> tuple[Action, ...]:
    """Return the actions of a backward: average among workers, or else over all ranks during the warm-up only."""
    if has_workers:
        return (ReduceGradients("worker"),)
    return (ReduceGradients(),) if progress.step < warmup else ()


def after_warmup(warmup: int) -> str:
    """Return the suffix that says that parameters do not sync before the end of the warm-up."""
    return f", after {format_count(warmup, 'synchronous step')}" if warmup else ""


def warmup_words(warmup: int) -> str:
    """Return the prefix that says when buffers sync during the warm-up."""
    return "every step of the warm-up, then " if warmup else ""


def gradients_rule(within: EverythingWithin, warmup: int) -> Rule:
    """Return the rule for gradients of a strategy that syncs parameters."""
    if within is not None:
        among = "the ranks of a host" if within == "host" else f"{within} ranks"
        return Rule("every backward outside no_sync", f"mean over {among}, all_reduce", "none among them")
    if warmup:
        return Rule(f"in the first {format_count(warmup, 'step')}", "mean, all_reduce", "afterwards local")
    return Rule("never: they stay local", None, "local values differ")
