"""Products of faults in `sl.steps`: which of them each change runs, and what must come out of each."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import drifting
import elastic
import pytest
from elastic import Fault, Plan

from support.cases import case
from syncline.testing import RankPool

__all__ = ["TRANSPORTS", "Run", "Runs", "of_all", "run_all"]

TRANSPORTS = ("shm", "c10d")

MOST_AT_ONCE = 100
"""How many cases one test runs at most: each takes a second or more."""


@dataclass(frozen=True)
class Run:
    """A plan, and what each process has written down."""

    plan: Plan
    notes: list[list[dict[str, Any]]]

    def finals(self, *, may_miss: bool = False) -> list[dict[str, Any]]:
        """Check all invariants of the training, and return the last note of each process that has finished."""
        plan, notes = self.plan, self.notes
        if plan.training in ("every step", "sharded"):
            return elastic.check(
                notes, takes_mean=plan.keeps_global_batch, may_miss=may_miss, steps=plan.steps
            )
        are_several = sum("done" in lines[-1] for lines in notes if lines) > 1  # one rank alone never syncs
        is_exact = plan.training in ("LocalSGD", "DiLoCo") and not plan.num_newcomers
        return drifting.check(plan, notes, has_reference=are_several and is_exact)

    def values(self, key: str, *ranks: int) -> list[Any]:
        """What these processes, or all, have noted under a key."""
        chosen = [self.notes[rank] for rank in ranks] or self.notes
        return [line[key] for lines in chosen for line in lines if key in line]


@dataclass(frozen=True)
class Runs:
    """Runs plans on ranks that stay warm."""

    pool: RankPool

    def __call__(self, size: int, transport: str, *faults: Fault, **settings: Any) -> Run:
        return self.of(Plan(size=size, transport=transport, faults=faults, **settings))

    def of(self, plan: Plan) -> Run:
        """Run a plan, on ranks that meet at a store of their own."""
        store = elastic.held_store()
        plan = replace(plan, port=store.port)
        with tempfile.TemporaryDirectory() as folder:
            return Run(plan, elastic.run(plan, folder, self.pool))


def of_all(cases: Sequence[tuple[Any, ...]], num_paired: int = 0) -> Callable[[Callable[..., None]], Any]:
    """Make a test of these cases, each of which it gets after the fixture `run`.

    In each change, each value occurs, and each pair of the first `num_paired` values. At night, all others do.
    """
    chosen = _chosen(cases, num_paired)
    others = [one for one in cases if one not in chosen]
    parts = [
        pytest.param(others[at : at + MOST_AT_ONCE], id=f"others from {at}", marks=pytest.mark.nightly)
        for at in range(0, len(others), MOST_AT_ONCE)
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("cases", [pytest.param(chosen, id="chosen"), *parts])
        def of_cases(cases: Sequence[tuple[Any, ...]], run: Runs) -> None:
            run_all(lambda *values: test(run, *values), cases)

        return of_cases

    return decorate


def run_all(program: Callable[..., None], cases: Sequence[tuple[Any, ...]]) -> None:
    """Run all cases, also after one has failed, and name those that have."""
    errors = []
    for values in cases:
        try:
            with case(*values):
                program(*values)
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(cases)} cases failed", errors)


def _chosen(cases: Sequence[tuple[Any, ...]], num_paired: int) -> list[tuple[Any, ...]]:
    """Choose few cases that have all values, and all pairs; of equally good ones those with values seldom used."""

    def targets(values: tuple[Any, ...]) -> set[Any]:
        numbered = list(enumerate(values))
        return {*numbered, *combinations(numbered[:num_paired], 2)}

    missing = set[Any]().union(*map(targets, cases))
    used = Counter[Any]()
    chosen = []
    while missing:
        best = max(
            cases,
            key=lambda one: (len(missing & targets(one)), -sum(used[value] for value in enumerate(one))),
        )
        chosen.append(best)
        used.update(enumerate(best))
        missing -= targets(best)
    return chosen
