"""Is what ours did right, given what torch's class did?

The rule: code that is right under torch's class runs, and is right; an error is for code that is wrong or would hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .facts import Facts, facts_of
from .interpreter import Outcome
from .program import Program

__all__ = ["Fault", "Report", "Verdict", "judge"]

_TOLERANCE = {"float64": (1e-9, 1e-11), "float32": (2e-4, 2e-5)}
"""Relative and absolute, against one process, which adds up the same numbers in another order."""
_UNNAMED = (
    "Connection closed",
    "Timed out",
    "[enforce fail",
    "Connection reset",
    "Broken pipe",
    "gloo/",
    "INTERNAL ASSERT",
)
"""What an error of ours never says: nobody can act on it."""

_CALLS_OF_TORCH = ("total(", "average(", ".join()", "swap(")
"""Lines whose collectives are the program's own, or those of torch's Join; or that torch refuses."""

_STRICTER: tuple[tuple[str, Callable[[Facts], bool]], ...] = (
    ("it is reduced here, as users expect; torch leaves it local", lambda facts: facts.backwards_alone),
    ("torch pairs it with another rank's next forward", lambda facts: facts.sends_buffers_alone),
    ("no_sync is read when the backward runs", lambda facts: facts.contradicts_join),
    (
        "each backward outside of no_sync is reduced, also one that the other rank has not",
        lambda facts: facts.decides_otherwise and facts.is_uneven,
    ),
    ("a step ends with the backwards of all heads", lambda facts: facts.interrupts_heads),
    ("torch refuses to swap parameters that a graph refers to", lambda facts: facts.swaps_in_graph),
    ("buffers of other sizes are sent", lambda facts: facts.sends_lazy),
    ("init_sync=False: the ranks compare what they were given, still", lambda facts: facts.wraps_alone),
)
"""Where ours may raise though torch's class is right: the reason, as in docs/reference/compatibility.md, and when."""

Report = dict[str, Outcome]
"""Of one program on one rank, by way."""


@dataclass(frozen=True)
class Fault:
    """What ours did wrong."""

    way: str
    kind: str
    """A word for it, by which faults are known to be the same."""
    text: str
    cause: str = ""
    """The type of the error, where it is one."""

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for faults that are taken to be the same."""
        return self.kind, self.cause


@dataclass(frozen=True)
class Verdict:
    """Of one program."""

    torch: str
    """How torch's class fared: "right", "differs", "raises", "dies", "hangs" or "wrong"."""
    ours: tuple[str, ...]
    """How ours fared, way by way: "right", "raises" or "differs"."""
    faults: tuple[Fault, ...]


def judge(program: Program, reports: tuple[Report, Report], one: Outcome | None) -> Verdict:
    """Compare the outcomes of both ranks, and of one process where that has a meaning."""
    facts = facts_of(program)
    if one is not None and one.error is not None:
        one = None
    theirs = _Run("torch", program, facts, (reports[0]["torch"], reports[1]["torch"]), one)
    fared = theirs.fared()
    faults: list[Fault] = []
    ours = []
    for way in reports[0]:
        if way == "torch":
            continue
        run = _Run(way, program, facts, (reports[0][way], reports[1][way]), one)
        ours.append(run.fared())
        faults += run.faults_beside(theirs)
    return Verdict(fared, tuple(ours), tuple(faults))


class _Run:
    """One program in one way, on both ranks."""

    def __init__(
        self, way: str, program: Program, facts: Facts, outcomes: tuple[Outcome, Outcome], one: Outcome | None
    ) -> None:
        self.way = way
        self.program = program
        self.facts = facts
        self.outcomes = outcomes
        self.one = one

    def fared(self) -> str:
        a, b = self.outcomes
        if "Died" in (*a.kinds, *b.kinds):
            return "dies"
        if a.was_alone or b.was_alone:
            return "hangs"
        if a.error or b.error:
            return "raises"
        if self.difference_between_ranks():
            return "differs"
        return "wrong" if self.difference_from_one_process() else "right"

    # ------------------------------------------------------------------ comparisons

    def difference_between_ranks(self) -> str | None:
        """Where parameters or gradients of the two ranks differ, unless the program asks for that."""
        a, b = self.outcomes
        for name, parameter in a.parameters.items():
            if not _same(parameter, b.parameters.get(name)):
                return (
                    f"the parameter {name} differs between ranks: {_shown(parameter, b.parameters.get(name))}"
                )
        local = self.local()
        for name, gradient in a.gradients.items():
            if name.split(".")[0] not in local and not _same(gradient, b.gradients.get(name)):
                return (
                    f"the gradient of {name} differs between ranks: {_shown(gradient, b.gradients.get(name))}"
                )
        return None

    def difference_from_one_process(self) -> str | None:
        if self.one is None:
            return None
        for rank, outcome in enumerate(self.outcomes):
            found = _difference(outcome, self.one, _TOLERANCE[self.program.dtype], without=self.local())
            if found:
                return f"rank {rank} against one process: {found}"
        return None

    def difference_from(self, theirs: _Run, *, exactly: bool) -> str | None:
        for rank, (mine, other) in enumerate(zip(self.outcomes, theirs.outcomes, strict=True)):
            local = frozenset[str]() if exactly else self.local()
            tolerance = None if exactly else _TOLERANCE[self.program.dtype]
            buffers = not self.facts.sends_buffers_after_join
            found = _difference(mine, other, tolerance, without=local, buffers=buffers)
            # A backward through .module is reduced here (docs/reference/compatibility.md): another norm.
            if (
                not found
                and exactly
                and not self.facts.backwards_bare
                and repr(mine.seen) != repr(other.seen)
            ):
                found = f"losses: {_first_difference(mine.seen, other.seen)}"
            if found:
                return f"rank {rank}, ours and torch's: {found}"
        return None

    def local(self) -> frozenset[str]:
        """Models whose gradients are each rank's own at the end, as the program asked for."""
        return frozenset(f"m{model}" for model in self.facts.ends_local)

    # ------------------------------------------------------------------ the verdict

    def faults_beside(self, theirs: _Run) -> list[Fault]:
        how = theirs.fared()
        mine = self.fared()
        if mine == "dies":
            return [self.fault("a process died", self.errors())]
        if self.facts.refuses_expanded:
            refused = [self.refuses_expanded(outcome) for outcome in self.outcomes]
            return [] if all(refused) else [self.fault("expanded buffer", self.errors())]
        errors = [outcome for outcome in self.outcomes if outcome.error]
        if how == "right":
            if errors and any(applies(self.facts) for _, applies in _STRICTER):
                return self.unnamed(theirs)
            if errors:
                return [self.fault("raises", self.errors())]
            if mine == "hangs":
                return [self.fault("hangs", "a rank waited for one that had ended")]
            if self.facts.decides_otherwise and self.facts.steps_local:
                return []  # no_sync is read when the backward runs (docs/reference/compatibility.md): asked for
            if self.facts.torch_errs:
                return self.wrong()
            is_other = self.facts.decides_otherwise or self.facts.compiles or self.facts.ends_between_heads
            found = self.difference_from(theirs, exactly=not is_other)
            if found:
                return [self.fault("differs from torch", found)]
            if any(outcome.has_warned for outcome in self.outcomes) and not self.facts.is_uneven:
                return [self.fault("false warning", "parameters were equal, and a look at them warned")]
            return self.wrong()
        if errors:
            return self.unnamed(theirs)
        if mine == "hangs":
            return [self.fault("hangs", "a rank waited for one that had ended")]
        if (
            how == "wrong"
            and self.program.dtype == "float32"
            and not self.difference_from(theirs, exactly=True)
        ):
            return []  # the same bits: rounding that a few steps have made large
        found = self.difference_between_ranks()
        was_said = all(outcome.has_warned for outcome in self.outcomes) or self.facts.drifts_unseen
        if found and not self.facts.steps_local and not self.facts.is_uneven and not was_said:
            return [self.fault("silent difference", found)]
        return [] if found else self.wrong()

    def refuses_expanded(self, outcome: Outcome) -> bool:
        """Whether a rank says, where it wraps a module, that an expanded buffer cannot be written, and which one."""
        error = outcome.error or ""
        return "DDP(" in outcome.line and "several elements of" in error and ".scale" in error

    def wrong(self) -> list[Fault]:
        found = self.difference_from_one_process()
        return [self.fault("differs from one process", found)] if found else []

    def unnamed(self, theirs: _Run) -> list[Fault]:
        """Errors that are neither ours nor torch's; what torch's class would have raised had it lived, nobody knows."""
        has_died = theirs.fared() == "dies"
        allowed = {outcome.kinds[0] for outcome in theirs.outcomes if outcome.error}
        for rank, outcome in enumerate(self.outcomes):
            if outcome.error is None:
                continue
            is_ours = "SynclineError" in outcome.kinds
            if any(call in outcome.line for call in _CALLS_OF_TORCH):
                continue
            # A name that the program has not set, in a line that torch's class did not come to, is its own affair.
            is_allowed = has_died or outcome.kinds[0] in {"NameError", *allowed}
            if not is_ours and (not is_allowed or any(w in outcome.error for w in _UNNAMED)):
                return [self.fault("unnamed error", f"rank {rank}: {outcome.error}")]
            other = self.outcomes[1 - rank]
            in_own_call = any(call in other.line for call in _CALLS_OF_TORCH)
            if "CollectiveTimeout" in outcome.kinds and not in_own_call:
                return [self.fault("timeout", self.errors())]
        return []

    def errors(self) -> str:
        return "\n".join(
            f"rank {rank}, line {outcome.line}\n    {outcome.error}"
            if outcome.error
            else f"rank {rank} ended in good order"
            + (", while the other one waited" if outcome.was_alone else "")
            for rank, outcome in enumerate(self.outcomes)
        )

    def fault(self, kind: str, text: str) -> Fault:
        order = sorted(self.outcomes, key=lambda outcome: "PeerFailed" in outcome.kinds)
        causes = [outcome.kinds[0] for outcome in order if outcome.error]
        return Fault(self.way, kind, text, causes[0] if causes else "")


def _difference(
    mine: Outcome,
    other: Outcome,
    tolerance: tuple[float, float] | None,
    *,
    without: frozenset[str] = frozenset(),
    buffers: bool = False,
) -> str | None:
    """Where two outcomes differ, in words."""
    groups = [("parameter", mine.parameters, other.parameters), ("gradient", mine.gradients, other.gradients)]
    if buffers:
        groups.append(("buffer", mine.buffers, other.buffers))
    for what, ours, theirs in groups:
        for name in ours.keys() | theirs.keys():
            if what == "gradient" and name.split(".")[0] in without:
                continue
            a, b = ours.get(name), theirs.get(name)
            if not _same(a, b, tolerance):
                return f"{what} {name}: {_shown(a, b)}"
    return None


def _same(a: Tensor | None, b: Tensor | None, tolerance: tuple[float, float] | None = None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance is None or not a.is_floating_point():
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return torch.allclose(a, b, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)


def _shown(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape:
        return " and ".join(
            str(None if tensor is None else tensor.flatten()[:3].tolist()) for tensor in (a, b)
        )
    at = int((a != b).flatten().to(torch.uint8).argmax())
    return f"{a.flatten()[at].item()!r} and {b.flatten()[at].item()!r} at element {at}"


def _first_difference(a: list[float], b: list[float]) -> str:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if repr(x) != repr(y):
            return f"{x!r} and {y!r} at number {at}"
    return f"{len(a)} and {len(b)} of them"
