"""Membership: the state machine by which one process agrees with the others on the processes that train.

[Note: generations]

The processes that train together are the members of a *generation*. Their places in the list are their ranks. If a
member is lost, or a process wants to join, the members stop at the same place: each publishes a report with the number
of steps that it has committed, and stops sending in its generation. From the reports, a process computes the next
generation and writes it into the store of the launcher, under the generation's number, if there is none yet. So at most
one proposal becomes the next generation, whichever processes propose. A process that is not in it can never send to the
others again, because the new members connect to each other anew. It may come back as a newcomer, under another name.

Observations of a process, such as a lost connection, never decide the membership. They only make a process stop and
report. A report that comes after the decision changes nothing.

[Note: the step of a generation]

This module calls each commit that `steps.py` counts a step.

A step is committed when the optimizer steps, after the gradients of all members have arrived. If a member is lost at
this moment, some members may have committed the step and others not. A process is at most one step behind, because it
takes part in every step, unless replicas drift under a strategy. The next generation begins after the last step that
any of its members has committed. Members that are behind this step load the state of a member that has committed it.

A step that only lost processes have committed is run again by the others. No trace of it remains, not even in a saved
state: a save is collective, so it happens only after all members have committed the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Membership:
    """The processes that train together in one generation.

    Args:
        generation: the number of the generation. The first is 0.
        members: the names of the processes, in rank order. A name is never used by two processes.
        step: the number of committed steps with which the generation begins.
        sources: the members that have committed this number of steps. The other members load the state of one of them.
    """

    generation: int
    members: tuple[str, ...]
    step: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The message that a process publishes when it stops for the next generation.

    Args:
        member: the name of the process.
        step: the number of steps that it has committed; -1 for a process that wants to join, or has joined but has not
            loaded the state.
    """

    member: str
    step: int


@dataclass(frozen=True)
class Observation:
    """The observations of a process while it waits for the next generation.

    Args:
        reports: the reports for the next generation, by member.
        ended: the members that have certainly left: their processes have ended, or have left the loop. A member that is
            only silent is not among them.
        alive: the members that show signs of life. They may be computing, and report later.
        decided: the next generation, if it has been decided.
    """

    reports: Mapping[str, Report]
    ended: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    decided: Membership | None = None


@dataclass(frozen=True)
class Rules:
    """The conditions under which a smaller or larger generation may begin.

    Args:
        min_ranks: the smallest number of members.
        max_ranks: the number of members up to which newcomers are admitted. Further newcomers wait.
        needs_majority: whether more than half of the members that have not certainly ended must report.
        patience_seconds: how long the reporting members wait for a member that shows no sign of life and has not
            certainly ended.
        timeout_seconds: how long they wait for a member that shows signs of life.
    """

    min_ranks: int = 1
    max_ranks: int = 2**31
    needs_majority: bool = True
    patience_seconds: float = 5.0
    timeout_seconds: float = 300.0


@dataclass(frozen=True)
class Wait:
    """The process has to observe again later. `missing` are the members without a report."""

    missing: tuple[str, ...]


@dataclass(frozen=True)
class Propose:
    """The process has to write this generation into the store, unless one with this number exists, and look again."""

    membership: Membership


@dataclass(frozen=True)
class Adopt:
    """The process is a member of the next generation."""

    membership: Membership
    loads: bool
    """Whether it has to load the state of one of the sources first."""


@dataclass(frozen=True)
class Leave:
    """The process has to leave the training; the reason is a sentence."""

    reason: str


Action = Wait | Propose | Adopt | Leave


def next_membership(
    current: Membership, observed: Observation, rules: Rules, *, waited_seconds: float
) -> Membership | Wait | Leave:
    """Compute the next generation from the reports.

    Args:
        current: the present generation.
        observed: the observations of the process.
        rules: the conditions for the next generation.
        waited_seconds: how long the process has waited for the reports.

    Returns:
        The next generation; or `Wait`, if reports are missing that may still come; or `Leave`, if too few members are
        left.

    Examples:
        >>> three = Membership(0, ("a", "b", "c"), step=0, sources=("a", "b", "c"))
        >>> reports = {"a": Report("a", 7), "c": Report("c", 8)}
        >>> seen = Observation(reports, ended=frozenset({"b"}))
        >>> next_membership(three, seen, Rules(), waited_seconds=0.0)
        Membership(generation=1, members=('a', 'c'), step=8, sources=('c',))
        >>> next_membership(three, Observation(reports), Rules(), waited_seconds=0.0)
        Wait(missing=('b',))
    """
    stayed = [name for name in current.members if name in observed.reports and name not in observed.ended]
    missing = tuple(
        name for name in current.members if name not in observed.reports and name not in observed.ended
    )
    may_report = any(name in observed.alive for name in missing)
    limit_seconds = rules.timeout_seconds if may_report else rules.patience_seconds
    if not stayed or (missing and waited_seconds < limit_seconds):
        return Wait(missing)
    newcomers = sorted(observed.reports.keys() - {*current.members, *observed.ended})
    members = (*stayed, *newcomers[: max(0, rules.max_ranks - len(stayed))])
    if rules.needs_majority and 2 * len(stayed) <= len(stayed) + len(missing):
        return Leave(
            f"{len(stayed)} of the {len(stayed) + len(missing)} members of generation {current.generation} that have "
            "not ended can reach each other, which is not the majority, so the others may be training without them"
        )
    if len(members) < rules.min_ranks:
        return Leave(
            f"expected at least {rules.min_ranks} ranks (min_ranks), but only {len(members)} of "
            f"{len(current.members)} remain"
        )
    step = max(observed.reports[name].step for name in stayed)
    if step < 0:
        return Leave("no process is left that has the state of the training")
    sources = tuple(name for name in stayed if observed.reports[name].step == step)
    return Membership(current.generation + 1, members, step, sources)


class State(Enum):
    """The state of one process."""

    TRAINING = "training"
    CHANGING = "changing"
    OUT = "out"


class Member:
    """One process, from its first generation until it leaves.

    A process calls `stop` when it has to change the generation, publishes the report that `stop` returns, and then
    calls `look` with its observations repeatedly, until the result is `Adopt` or `Leave`.

    Args:
        name: the name of the process.
        membership: its first generation; for a newcomer, the present generation of the members.
        rules: the conditions for the next generation. They are equal in all processes.
    """

    def __init__(self, name: str, membership: Membership, rules: Rules) -> None:
        self.name = name
        self.membership = membership
        self.rules = rules
        self.state = State.TRAINING if name in membership.members else State.OUT
        self._stopped_at = 0.0
        self._step = -1

    def stop(self, *, step: int, now: float) -> Report:
        """Stop training in the present generation, or ask to join the next one.

        Args:
            step: the number of steps that this process has committed; -1 for a newcomer.
            now: the time, in seconds.

        Returns:
            The report to publish for the next generation.
        """
        self.state = State.CHANGING
        self._stopped_at, self._step = now, step
        return Report(self.name, step)

    def look(self, observed: Observation, *, now: float) -> Action:
        """Return the next action of this process, given its observations.

        Args:
            observed: the observations about the generation that follows the present one.
            now: the time, in seconds.
        """
        assert self.state is State.CHANGING, self.state
        if self._step < 0 and (observed.alive or observed.decided is not None):
            self._stopped_at = now  # the members are alive, so the timeout starts anew
        if observed.decided is not None:
            return self._follow(observed.decided)
        if self._step < 0:
            return self._wait_to_be_taken_in(observed, now)
        found = next_membership(self.membership, observed, self.rules, waited_seconds=now - self._stopped_at)
        if isinstance(found, Membership):
            return Propose(found)
        if isinstance(found, Leave):
            self.state = State.OUT
        return found

    def _wait_to_be_taken_in(self, observed: Observation, now: float) -> Wait | Leave:
        """Wait until the members admit this newcomer, as long as one of them may have the state."""
        left = [name for name in self.membership.members if name not in observed.ended]
        if left and all(name in observed.reports and observed.reports[name].step < 0 for name in left):
            reason = "no process is left that has the state of the training"
        elif now - self._stopped_at > self.rules.timeout_seconds:
            reason = f"no member shows a sign of life for {self.rules.timeout_seconds:g} s"
        else:
            return Wait(())
        self.state = State.OUT
        return Leave(reason)

    def _follow(self, decided: Membership) -> Adopt | Leave | Wait:
        assert decided.generation == self.membership.generation + 1, (decided, self.membership)
        if self.name in decided.members:
            self.membership = decided
            self.state = State.TRAINING
            return Adopt(decided, loads=self.name not in decided.sources)
        if self._step < 0:  # no room, or decided before this process asked: ask to join the next generation
            self.membership = decided
            return Wait(())
        self.state = State.OUT
        return Leave(
            f"the other members began generation {decided.generation} without this process, because its report had "
            "not arrived"
        )
