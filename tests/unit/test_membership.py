"""Which processes train together: the rules, and thousands of runs in which processes fail, without each rule once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from membership_simulation import CloseDeaths, World, check, check_close_deaths, check_job
from simulated_processes import Broken

from syncline.resilience.membership import (
    Action,
    Adopt,
    Leave,
    Member,
    Membership,
    Observation,
    Propose,
    Report,
    Rules,
    Wait,
    next_membership,
)

FOUR = Membership(0, ("a", "b", "c", "d"), step=0, sources=("a", "b", "c", "d"))


def reports(**steps: int) -> dict[str, Report]:
    return {name: Report(name, step) for name, step in steps.items()}


def after(reported: dict[str, Report], *ended: str, waited_seconds: float = 0.0, **rules: Any) -> Any:
    observed = Observation(reported, frozenset(ended))
    return next_membership(FOUR, observed, Rules(**rules), waited_seconds=waited_seconds)


def test_the_survivors_keep_their_order_and_begin_after_the_last_committed_step() -> None:
    assert after(reports(d=7, a=7, c=8), "b") == Membership(1, ("a", "c", "d"), step=8, sources=("c",))


def test_a_member_that_has_reported_and_ended_is_left_out() -> None:
    assert after(reports(a=8, b=7, c=7, d=7), "a") == Membership(
        1, ("b", "c", "d"), step=7, sources=("b", "c", "d")
    )


def test_silent_members_are_waited_for_as_long_as_patience_lasts() -> None:
    assert after(reports(a=7, b=7, c=7)) == Wait(("d",))
    assert after(reports(a=7, b=7, c=7), waited_seconds=5.0).members == ("a", "b", "c")
    assert after({}, waited_seconds=5.0) == Wait(FOUR.members)  # its own report has not arrived


def test_silent_members_may_be_the_majority_and_ended_ones_not() -> None:
    refused = after(reports(a=7, b=7), waited_seconds=5.0)
    assert isinstance(refused, Leave)
    assert "2 of the 4 members of generation 0 that have not ended" in refused.reason
    assert after(reports(a=7, b=7), waited_seconds=5.0, needs_majority=False).members == ("a", "b")
    assert after(reports(a=7), "b", "c", "d").members == ("a",)


def test_too_few_members() -> None:
    refused = after(reports(a=7), "b", "c", "d", min_ranks=2)
    assert refused == Leave("expected at least 2 ranks (min_ranks), but only 1 of 4 remain")


def test_newcomers_get_the_last_ranks_and_count_for_no_majority() -> None:
    joined = after(reports(a=7, b=7, c=7, d=7, f=-1, e=-1), max_ranks=5)
    assert joined == Membership(1, ("a", "b", "c", "d", "e"), step=7, sources=("a", "b", "c", "d"))
    assert isinstance(after(reports(a=7, b=7, e=-1, f=-1), waited_seconds=5.0), Leave)


def test_what_arrives_after_the_decision_changes_nothing() -> None:
    member = Member("d", FOUR, Rules())
    member.stop(step=7, now=0.0)
    decided = Membership(1, ("a", "b", "c"), step=7, sources=("a", "b", "c"))
    observed = Observation(reports(a=7, b=7, c=7, d=7), decided=decided)
    action = member.look(observed, now=0.0)
    assert isinstance(action, Leave)
    assert "because its report had not arrived" in action.reason


def test_a_newcomer_waits_until_it_is_taken_in() -> None:
    newcomer = Member("e", FOUR, Rules())
    newcomer.stop(step=-1, now=0.0)
    assert newcomer.look(Observation(reports(e=-1)), now=100.0) == Wait(())
    others = Membership(1, ("a", "b"), step=7, sources=("a",))
    assert newcomer.look(Observation({}, decided=others), now=100.0) == Wait(())
    taken = Membership(2, ("a", "b", "e"), step=9, sources=("a", "b"))
    assert newcomer.look(Observation({}, decided=taken), now=100.0) == Adopt(taken, loads=True)


def test_a_newcomer_leaves_if_no_member_is_left_that_could_take_it_in() -> None:
    newcomer = Member("e", FOUR, Rules())
    newcomer.stop(step=-1, now=0.0)
    ended = frozenset({"c", "d"})
    assert newcomer.look(Observation(reports(a=-1), ended), now=1.0) == Wait(())  # b may have the state
    assert newcomer.look(Observation({}, ended, alive=frozenset({"b"})), now=299.0) == Wait(())
    assert newcomer.look(Observation({}, ended), now=598.0) == Wait(())
    silent = newcomer.look(Observation({}, ended), now=600.0)
    assert silent == Leave("no member shows a sign of life for 300 s")
    newcomer.stop(step=-1, now=0.0)
    without = newcomer.look(Observation(reports(a=-1, b=-1, e=-1), ended), now=1.0)
    assert without == Leave("no process is left that has the state of the training")


# ---------------------------------------------------------------------- many runs

RUNS = 1000


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.real) for n in (RUNS, 2 * RUNS))])
def test_no_run_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + RUNS):
        check(seed)


JOBS = 300


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n * JOBS, marks=pytest.mark.nightly) for n in range(1, 11))]
)
def test_no_run_of_the_real_loop_breaks_an_invariant(first: int) -> None:
    """In 77, 204, 261 and 288, newcomers waited for ever for members that were gone."""
    for seed in range(first, first + JOBS):
        check_job(seed)


@pytest.mark.parametrize(
    ("names", "joins"), [(("p1", "p2"), False), (("p1", "p3"), True), (("p2", "p5"), True)]
)
def test_two_processes_may_crash_at_each_pair_of_awaits_of_a_change(
    names: tuple[str, str], joins: bool
) -> None:
    """The others make their next step soon after the second one has. Process p5 is the one that joins."""
    assert check_close_deaths(names, joins=joins) > 300


class SeesNoEnd(CloseDeaths):
    """An ended process is waited for as one that is only silent."""

    def known_ends(self) -> frozenset[str]:
        return frozenset()


class NoticesNoEnd(CloseDeaths):
    """A process that waits for an ended one waits until the timeout."""

    def leave_all(self, name: str) -> None:
        pass


@pytest.mark.parametrize("world", [SeesNoEnd, NoticesNoEnd])
def test_a_world_that_waits_for_ended_processes_is_caught(world: type[CloseDeaths]) -> None:
    with pytest.raises(Broken, match=r"made its next step \d.\d+ s after the last death|not the majority"):
        check_close_deaths(("p1", "p2"), joins=False, world=world)


class Overwrites(World):
    """The last proposal wins, and not the first."""

    def decide(self, proposal: Membership) -> Any:
        self.store.set(f"generation {proposal.generation}", proposal)


class Unfenced(Member):
    """A process that was thought dead comes back into the generation."""

    def _follow(self, decided: Membership) -> Any:
        if self.name not in decided.members and self._step >= 0:
            decided = replace(decided, members=(*decided.members, self.name))
        return super()._follow(decided)


class FollowsItself(Member):
    """A process begins the generation that it has proposed."""

    def look(self, observed: Observation, *, now: float) -> Action:
        found = super().look(observed, now=now)
        return self._follow(found.membership) if isinstance(found, Propose) else found


class LoadsNothing(World):
    """A process that is a step behind goes on with its own state."""

    def adopt(self, name: str, action: Adopt) -> Any:
        if self.steps[name] >= 0:
            self.steps[name] = action.membership.step
            action = replace(action, loads=False)
        return super().adopt(name, action)


class NeedsNoState(Member):
    """Processes that have joined, but have not loaded the state, train on with their own one."""

    def look(self, observed: Observation, *, now: float) -> Action:
        reports = {name: replace(one, step=max(one.step, 0)) for name, one in observed.reports.items()}
        self._step = max(self._step, 0)
        return super().look(replace(observed, reports=reports), now=now)


def of(member: type[Member]) -> type[World]:
    """A world of such processes."""
    return type(member.__name__, (World,), {"member_class": member})


def changed(change: Callable[[Membership, Membership, Observation], Membership]) -> type[World]:
    """A world whose processes compute the next generation otherwise."""

    class Changed(Member):
        def look(self, observed: Observation, *, now: float) -> Action:
            found = super().look(observed, now=now)
            if isinstance(found, Propose):
                return Propose(change(self.membership, found.membership, observed))
            return found

    return of(Changed)


def begins_too_early(current: Membership, found: Membership, observed: Observation) -> Membership:
    """The generation begins after the last step that all members have committed: a committed step is lost."""
    steps = {name: observed.reports[name].step for name in found.members if name in current.members}
    step = min(steps.values())
    return replace(found, step=step, sources=tuple(name for name, own in steps.items() if own == step))


def is_no_majority(current: Membership, found: Membership, observed: Observation) -> Membership:
    """One member goes on alone."""
    return replace(found, members=found.members[:1], sources=found.sources[:1])


@pytest.mark.parametrize(
    "world",
    [
        Overwrites,
        of(Unfenced),
        of(FollowsItself),
        LoadsNothing,
        of(NeedsNoState),
        pytest.param(changed(begins_too_early), id="begins too early"),
        pytest.param(changed(is_no_majority), id="is no majority"),
    ],
)
def test_a_world_without_a_safeguard_is_caught(world: type[World]) -> None:
    with pytest.raises(Broken, match="seed"):
        for seed in range(2000):
            check(seed, world)
