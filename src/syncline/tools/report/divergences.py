"""Replicas that differed, as the checks of a run have found them (pure functions)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from syncline.tools.report.run import Run
from syncline.tracing import rows
from syncline.words import describe_ranks, format_count

_REACTIONS = {
    "raised": "the error was raised on all ranks",
    "repaired": "the values of the majority were sent to all ranks",
    "warned": "training continued with values that differ",
}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A value that one check found different, once or again in later steps."""

    step: int
    """The step in which it was found first."""
    row: rows.DivergenceRow
    """What was recorded when it was found first."""
    num_found: int
    """How often it was found."""

    @property
    def fact(self) -> str:
        """What was found, as a clause."""
        if not self.row.tensor:
            return "the replicas differ"
        more = self.row.num_differing - 1
        others = f" and {format_count(more, 'other value')}" if more > 0 else ""
        return f"the replicas differ in {self.row.tensor}{others}"

    @property
    def minority(self) -> str:
        """A sentence that names the ranks in the minority."""
        if self.row.minority_ranks:
            return f"In the minority: {describe_ranks(self.row.minority_ranks)}."
        return "No value had a majority, so any rank may have the wrong one." if self.row.tensor else ""

    @property
    def agreed(self) -> str:
        """A sentence that says when the value was still equal on all ranks."""
        if self.row.agreed_at_step is None or not self.row.tensor:
            return ""
        when = (
            f"at step {self.row.agreed_at_step}" if self.row.agreed_at_step else "when the module was wrapped"
        )
        return f"All ranks last agreed on {self.row.tensor} {when}."

    @property
    def reaction(self) -> str:
        """What the check did."""
        again = f", and was found {self.num_found} times" if self.num_found > 1 else ""
        return f"{_REACTIONS.get(self.row.outcome, self.row.outcome)}{again}"

    def __str__(self) -> str:
        found = f"{self.row.check} found that {self.fact}; {self.reaction}."
        return " ".join(filter(None, [found, self.minority, self.agreed]))


def divergences_in(run: Run) -> list[Divergence]:
    """Return the values that differed, in the order of steps, each once for each check and reaction."""
    found: dict[tuple[str, str, str], list[tuple[int, rows.DivergenceRow]]] = {}
    for step, row in sorted(_once(run), key=lambda one: one[0]):
        found.setdefault((row.check, row.tensor, row.outcome), []).append((step, row))
    return [Divergence(step=same[0][0], row=same[0][1], num_found=len(same)) for same in found.values()]


def _once(run: Run) -> Iterator[tuple[int, rows.DivergenceRow]]:
    """Yield what was found, with its step. All ranks record it, and it is the same on all of them."""
    seen: set[tuple[object, ...]] = set()
    for one in run.processes:
        last, nth = 0, 0
        for row in one.found:
            if isinstance(row, rows.BackwardRow):
                if row.step != last:
                    last, nth = row.step, 0
            elif isinstance(row, rows.DivergenceRow):
                nth += 1  # several in one step, such as two calls of sl.check_replicas
                step = last if row.step is None else row.step
                key = (step, nth, row.check, row.tensor)
                if key not in seen:
                    seen.add(key)
                    yield step, row
