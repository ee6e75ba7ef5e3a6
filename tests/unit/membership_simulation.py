"""Processes that train, fail and change their membership, under a virtual clock.

The processes run `Member` as the real ones do; the store, the network and the steps are simulated. All chance comes
from one seed. Requests to the store, and its answers, arrive late, twice or not at all; a process is cut off from the
store for a while, is paused, or crashes, at any point; some processes cannot reach the others for a while. A step
reaches each member at another time, and if a member crashes meanwhile, some members have the step and others not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from simulated_processes import Broken, Host, Process, Simulation, simulated, sleep
from simulated_transport import Group, SimulatedSession
from torch import nn
from torch.utils.data import DataLoader

import syncline as sl
from support import inside
from syncline.environment import PATIENCE, patience
from syncline.errors import PeerFailed, PeerLost, SynclineError
from syncline.resilience.group import NotNeeded
from syncline.resilience.membership import (
    Adopt,
    Leave,
    Member,
    Membership,
    Observation,
    Propose,
    Report,
    Rules,
    Wait,
)

TARGET = 12
"""The number of steps of a run."""
SAVE_EVERY = 3

Program = Generator[Any, Any, str]


@dataclass
class Store:
    """A store whose operations happen one after the other."""

    held: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> None:
        self.held[key] = value

    def set_first(self, key: str, value: Any) -> Any:
        return self.held.setdefault(key, value)

    def read(self, generation: int) -> tuple[dict[str, Report], Membership | None]:
        prefix = f"report {generation} "
        reports = {
            key.removeprefix(prefix): value for key, value in self.held.items() if key.startswith(prefix)
        }
        return reports, self.held.get(f"generation {generation}")


@dataclass
class Round:
    """One collective of one generation: it succeeds on a member some time after all members have arrived."""

    arrived: set[str] = field(default_factory=set)
    waiting: dict[str, Callable[[bool], None]] = field(default_factory=dict)
    wants_change: bool = False
    """Whether a member has voted to change the generation after this step. All members hear the same votes."""


def after_step(state: str, step: int, members: tuple[str, ...]) -> str:
    """The state after a step, which depends on the members that have computed it."""
    return hashlib.sha256(f"{state} {step} {members}".encode()).hexdigest()[:12]


class World:
    """One run of some processes. Subclasses take a safeguard out, and must then be caught."""

    member_class: type[Member] = Member
    poll_seconds = 0.2

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.store = Store()
        self.rules = Rules(
            min_ranks=self.random.choice([1, 1, 2]),
            max_ranks=self.random.choice([3, 5, 100]),
            needs_majority=self.random.random() < 0.8,
            patience_seconds=5.0,
            timeout_seconds=20.0,
        )
        self.is_lossy = self.random.random() < 0.5
        self.faults: list[str] = []
        self.names = itertools.count(5)
        self.rounds: dict[Any, Round] = {}
        self.running: dict[str, Program] = {}
        self.stopped: set[tuple[str, int]] = set()
        """Members that no longer send in a generation."""
        self.crashed: set[str] = set()
        self.paused_until: dict[str, float] = {}
        self.cut_until: dict[str, float] = {}
        self.apart: frozenset[str] = frozenset()
        """Processes that can reach each other and the store, but not the other processes."""
        self.apart_until = 0.0
        self.ended: dict[str, str] = {}
        self.finished: set[str] = set()
        # What the invariants are about.
        self.adopted: dict[int, Membership] = {}
        self.committed: dict[tuple[int, int], str] = {}
        self.computed: dict[int, set[str]] = {}
        """The states that members have computed, by step."""
        self.states: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.handed_over: dict[int, str] = {}
        """The state that the sources have sent, by generation."""
        self.saves: dict[int, str] = {}
        self.begin()

    def begin(self) -> None:
        """Start the processes, and draw the faults."""
        self.start_members(self.random.randint(2, 5))
        for _ in range(self.random.randint(0, 6)):
            self.at(self.random.uniform(0, 10), self.fault)

    def start_members(self, number: int) -> None:
        first = tuple(f"p{index}" for index in range(number))
        self.first = Membership(0, first, 0, first)
        for name in first:
            self.start(name, self.member_class(name, self.first, self.rules), "start", 0)

    # ------------------------------------------------------------------ the clock

    def delay(self, longest_seconds: float) -> float:
        """How long something takes."""
        return self.random.uniform(0, longest_seconds)

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), happen))

    def run(self) -> None:
        for _ in range(20_000):
            if not self.events or self.is_over():
                return
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        raise Broken(f"no end after {self.now:.0f} s: {sorted(self.running)} still run")

    def is_over(self) -> bool:
        return not self.running and self.now > 10

    def start(self, name: str, member: Member, state: str, step: int) -> None:
        self.states[name], self.steps[name] = state, step
        if step >= 0:
            self.computed.setdefault(step, set()).add(state)
        self.running[name] = self.program(member)
        self.at(self.delay(1), lambda: self.resume(name, self.running.get(name), None))

    def resume(self, name: str, process: Program | None, value: Any) -> None:
        """Let a process go on with the answer that it has waited for, unless it has crashed meanwhile."""
        if process is None or self.running.get(name) is not process:
            return
        pause = self.paused_until.get(name, 0.0) - self.now
        if pause > 0:
            self.at(pause, lambda: self.resume(name, process, value))
            return
        try:
            asked = process.send(value)
        except StopIteration as end:
            del self.running[name]
            self.ended[name] = end.value
            if end.value == "done":
                self.finished.add(name)
            self.leave_all(name)
            return
        asked(name, process)

    # ------------------------------------------------------------------ faults

    def fault(self) -> None:
        if not self.running:
            return
        name = self.random.choice(sorted(self.running))
        kind = self.random.choice(["crash", "crash", "pause", "cut", "apart", "join"])
        self.faults.append(kind)
        if kind == "crash":
            self.crash(name)
        elif kind == "pause":
            self.paused_until[name] = self.now + self.random.uniform(0, 20)
        elif kind == "cut":
            self.cut_until[name] = self.now + self.random.uniform(0, 20)
        elif kind == "apart":
            self.apart = frozenset(one for one in sorted(self.running) if self.random.random() < 0.5)
            self.apart_until = self.now + self.random.uniform(0, 20)
        else:
            self.at(0.0, self.join)

    def crash(self, name: str) -> None:
        self.running.pop(name).close()
        self.crashed.add(name)
        self.leave_all(name)

    def join(self) -> None:
        """A newcomer asks to join after the newest generation."""
        name = f"p{next(self.names)}"
        generation = max([0, *(number for number in self.adopted)])
        newest = self.store.held.get(f"generation {generation}", self.first)
        self.start(name, self.member_class(name, newest, self.rules), "", -1)

    def leave_all(self, name: str) -> None:
        """The connections of a process are closed: whoever waits for it fails, if it has not all that it needs."""
        for key, found in self.rounds.items():
            members = self.adopted[key[0]].members if key[0] in self.adopted else self.first.members
            if name in members:
                self.fail_some(found, complete=len(found.arrived) == len(members))

    def fail_some(self, found: Round, *, complete: bool) -> None:
        for other in sorted(found.waiting):
            # What has arrived may have reached the other, or not.
            if not complete or self.random.random() < 0.5:
                self.at(self.delay(1), partial(found.waiting.pop(other), False))

    # ------------------------------------------------------------------ what a process can ask for

    def sleep(self, seconds: float) -> Callable[[str, Program], None]:
        return lambda name, process: self.at(seconds, lambda: self.resume(name, process, None))

    def ask_store(self, operate: Callable[[], Any]) -> Callable[[str, Program], None]:
        """Operate on the store. The process gets the answer, or None if it has not come in time."""

        def ask(name: str, process: Program) -> None:
            answered: list[Any] = []

            def answer(value: Any) -> None:
                if not answered:
                    answered.append(value)
                    self.resume(name, process, value)

            def arrive() -> None:
                value = operate()
                if not self.is_lost(name):
                    self.at(self.delay(0.3), lambda: answer((value,)))

            for _ in range(2 if self.random.random() < 0.1 else 1):
                if not self.is_lost(name):
                    self.at(self.delay(self.random.choice([0.01, 0.3, 3.0])), arrive)
            self.at(1.0, lambda: answer(None))

        return ask

    def is_lost(self, name: str) -> bool:
        return self.now < self.cut_until.get(name, 0.0) or (self.is_lossy and self.random.random() < 0.05)

    def collective(self, membership: Membership, what: Any) -> Callable[[str, Program], None]:
        """Take part in a collective of a generation. The process gets True, or False if it has failed."""
        key = (membership.generation, what)

        def ask(name: str, process: Program) -> None:
            found = self.rounds.setdefault(key, Round())
            answered: list[bool] = []

            def answer(value: bool) -> None:
                found.waiting.pop(name, None)
                if not answered:
                    answered.append(value)
                    self.resume(name, process, value)

            found.arrived.add(name)
            found.wants_change |= self.has_newcomer(membership)
            found.waiting[name] = answer
            gone = [m for m in membership.members if m not in self.running or (m, key[0]) in self.stopped]
            are_apart = self.now < self.apart_until and 0 < len(self.apart & {*membership.members}) < len(
                membership.members
            )
            if (
                are_apart and self.random.random() < 0.9
            ):  # what was sent before may arrive, and not everywhere
                pass
            elif set(membership.members) <= found.arrived:
                for other in sorted(found.waiting):
                    self.at(self.delay(0.5), partial(found.waiting[other], True))
            elif gone:
                self.at(self.delay(1), lambda: answer(False))
            self.at(4.0, lambda: answer(False))

        return ask

    def has_newcomer(self, membership: Membership) -> bool:
        reports, _ = self.store.read(membership.generation + 1)
        return len(membership.members) < self.rules.max_ranks and any(r.step < 0 for r in reports.values())

    # ------------------------------------------------------------------ a process

    def program(self, member: Member) -> Program:
        """What a process does. It yields what it asks for, and returns how it has ended."""
        name = member.name
        is_connected = self.steps[name] >= 0
        while True:
            if is_connected:
                membership, step = member.membership, self.steps[name]
                if step >= TARGET:
                    if (yield self.collective(membership, "end")):
                        return "done"
                elif (yield self.collective(membership, step)):
                    self.commit(name, membership)
                    if self.steps[name] % SAVE_EVERY or (yield self.collective(membership, f"save {step}")):
                        self.save(name)
                        if not self.rounds[membership.generation, step].wants_change:
                            continue
                self.stopped.add((name, membership.generation))
                self.leave_generation(name, membership)
            report = member.stop(step=self.steps[name], now=self.now)
            while True:
                generation = member.membership.generation + 1
                # A request may arrive long after it was sent, so it must not see what is assigned later.
                if (
                    yield self.ask_store(partial(self.store.set, f"report {generation} {name}", report))
                ) is None:
                    continue
                seen = yield self.ask_store(partial(self.store.read, generation))
                if seen is None:
                    continue
                reports, decided = seen[0]
                ended = self.known_ends()
                action = member.look(Observation(reports, ended, self.alive(), decided), now=self.now)
                if isinstance(action, Leave):
                    return action.reason
                if isinstance(action, Propose):
                    self.check_proposal(member.membership, action.membership)
                    yield self.ask_store(partial(self.decide, action.membership))
                elif isinstance(action, Wait):
                    if self.now > 200:
                        return "was not taken in"
                    yield self.sleep(self.poll_seconds)
                else:
                    break
            is_connected = yield from self.adopt(name, action)

    def known_ends(self) -> frozenset[str]:
        """The processes that are known to take no more part."""
        return frozenset(self.crashed | self.finished)

    def alive(self) -> frozenset[str]:
        """The processes that show signs of life in the store now."""
        silent = {**self.paused_until, **self.cut_until}
        return frozenset(name for name in self.running if silent.get(name, 0.0) <= self.now)

    def decide(self, proposal: Membership) -> Any:
        return self.store.set_first(f"generation {proposal.generation}", proposal)

    def adopt(self, name: str, action: Adopt) -> Generator[Any, Any, bool]:
        """Connect to the members of the generation, and load the state of a source, if this process has another."""
        membership = action.membership
        if self.adopted.setdefault(membership.generation, membership) != membership:
            raise Broken(f"two memberships of generation {membership.generation}")
        if (yield self.collective(membership, "connect")):
            if not action.loads and self.steps[name] != membership.step:
                raise Broken(f"{name} is a source at step {self.steps[name]}, not {membership.step}")
            if not action.loads:
                self.handed_over[membership.generation] = self.states[name]
            # A newcomer may be a member, and be lost or left alone, before it has got the state.
            if (yield self.collective(membership, "hand over")):
                if action.loads:
                    self.states[name] = self.handed_over[membership.generation]
                    self.steps[name] = membership.step
                if self.states[name] not in self.computed.get(self.steps[name], ()):
                    raise Broken(
                        f"{name} begins step {self.steps[name]} with a state that no member has computed"
                    )
                if (yield self.collective(membership, "loaded")):
                    return True
        self.stopped.add((name, membership.generation))
        self.leave_generation(name, membership)
        return False

    def leave_generation(self, name: str, membership: Membership) -> None:
        for key, found in self.rounds.items():
            if key[0] == membership.generation:
                self.fail_some(found, complete=set(membership.members) <= found.arrived)

    def commit(self, name: str, membership: Membership) -> None:
        step = self.steps[name]
        self.states[name] = after_step(self.states[name], step, membership.members)
        self.steps[name] = step + 1
        self.computed.setdefault(step + 1, set()).add(self.states[name])
        known = self.committed.setdefault((membership.generation, step), self.states[name])
        if known != self.states[name]:
            raise Broken(f"step {step} of generation {membership.generation} has two results")

    def save(self, name: str) -> None:
        step = self.steps[name]
        if step % SAVE_EVERY == 0 and self.saves.setdefault(step, self.states[name]) != self.states[name]:
            raise Broken(f"two saves after step {step} differ")

    # ------------------------------------------------------------------ invariants

    def check_proposal(self, current: Membership, proposal: Membership) -> None:
        stayed = [name for name in proposal.members if name in current.members]
        alive = [name for name in current.members if name not in self.crashed | self.finished]
        if len(proposal.members) < self.rules.min_ranks:
            raise Broken(f"{proposal.members} are too few")
        # A process may crash after it was counted.
        if self.rules.needs_majority and 2 * len(stayed) <= len(alive):
            raise Broken(f"{stayed} are no majority of {alive}")

    def check_end(self) -> None:
        """All that have finished have the same state, and a run that loses no majority finishes."""
        finals = {self.states[name] for name, how in self.ended.items() if how == "done"}
        if len(finals) > 1:
            raise Broken(f"the processes end with {len(finals)} states")
        if self.is_lossy or {"pause", "cut", "apart"} & {*self.faults}:
            return
        # Whoever is lost is known to be lost, so the others finish.
        survivors = [name for name in self.first.members if name not in self.crashed]
        if len(survivors) >= self.rules.min_ranks and not finals:
            raise Broken(f"{survivors} could have finished: {self.ended}")


@dataclass(frozen=True)
class Death:
    """A process crashes at one of its awaits of a change: before it has sent the request, or right after."""

    name: str
    nth: int
    is_sent: bool


class CloseDeaths(World):
    """Four processes, of which the first one crashes, or which a fifth one joins. Some crash while the ranks change.

    Nothing is slow, and nothing is lost on the way, so what takes long is a wait for a process that has ended.

    Args:
        joins: whether a process joins. Otherwise the first one crashes.
        deaths: who crashes at which await.
    """

    poll_seconds = 0.01

    def __init__(self, deaths: tuple[Death, ...], *, joins: bool) -> None:
        self.deaths, self.joins = deaths, joins
        self.awaits: Counter[str] = Counter()
        """How often each process has waited in a change."""
        self.died_at: list[float] = []
        self.stepped_at: dict[str, list[float]] = {}
        super().__init__(0)

    def begin(self) -> None:
        self.rules = Rules(max_ranks=5, patience_seconds=5.0, timeout_seconds=20.0)
        self.is_lossy = False
        self.start_members(4)
        self.at(0.01, self.join if self.joins else lambda: self.crash("p0"))

    def is_over(self) -> bool:
        return not any(name in self.running for name in self.first.members)

    def delay(self, longest_seconds: float) -> float:
        return min(longest_seconds, 0.002 + 0.001 * self.random.random())

    def sleep(self, seconds: float) -> Callable[[str, Program], None]:
        return self.counted(super().sleep(seconds))

    def ask_store(self, operate: Callable[[], Any]) -> Callable[[str, Program], None]:
        return self.counted(super().ask_store(operate))

    def collective(self, membership: Membership, what: Any) -> Callable[[str, Program], None]:
        ask = super().collective(membership, what)
        return self.counted(ask) if what in ("connect", "hand over", "loaded") else ask

    def counted(self, asked: Callable[[str, Program], None]) -> Callable[[str, Program], None]:
        """Count an await, at which the process may crash."""

        def ask(name: str, process: Program) -> None:
            self.awaits[name] += 1
            death = next(
                (one for one in self.deaths if (one.name, one.nth) == (name, self.awaits[name])), None
            )
            if death is None or death.is_sent:
                asked(name, process)
            if death is not None:
                self.crash(name)

        return ask

    def crash(self, name: str) -> None:
        self.died_at.append(self.now)
        super().crash(name)

    def commit(self, name: str, membership: Membership) -> None:
        super().commit(name, membership)
        self.stepped_at.setdefault(name, []).append(self.now)

    def check_end(self) -> None:
        super().check_end()
        for name in self.first.members:
            if name in self.crashed:
                continue
            if self.ended.get(name) != "done":
                raise Broken(f"{name} could have finished: {self.ended}")
            after = [at for at in self.stepped_at[name] if at > self.died_at[-1]] if self.died_at else []
            if after and after[0] - self.died_at[-1] > MOST_SECONDS:
                raise Broken(
                    f"{name} made its next step {after[0] - self.died_at[-1]:.2f} s after the last death"
                )


MOST_SECONDS = 0.5
"""How long the others may take until their next step, from the last death on."""


def check_close_deaths(names: tuple[str, str], *, joins: bool, world: type[CloseDeaths] = CloseDeaths) -> int:
    """Let two processes crash at each pair of their awaits, and return the number of pairs.

    Args:
        names: the two processes.
        joins: see `CloseDeaths`.
        world: the class of the world.
    """

    def reach(name: str, *before: Death) -> Iterator[Death]:
        """Yield the deaths of a process at each of its awaits, also after others have crashed."""
        for nth in itertools.count(1):
            for is_sent in (False, True):
                death = Death(name, nth, is_sent)
                found = world((*before, death), joins=joins)
                try:
                    found.run()
                    found.check_end()
                except Broken as error:
                    raise Broken(f"{(*before, death)}: {error}") from None
                if name not in found.crashed:
                    return
                yield death

    return sum(1 for first in reach(names[0]) for _ in reach(names[1], first))


# ---------------------------------------------------------------------- the real code of sl.steps


FILE = "tests/unit/membership_simulation.py"
UNTIL = 8
"""The number of steps of a run of `sl.steps`."""
UNTOLD = ("cut host", "cut store", "stop", "stop store", "end store")
"""Faults of which the other processes are not told, beside the loss of a host."""
BATCH = 2
NUM_SAMPLES = 100
LIMIT_SECONDS = 400.0
"""When a run of `sl.steps` must have ended. The last fault is over after 35 s, and the longest wait takes 30 s."""
TOLD_SECONDS, SILENT_SECONDS = 6.0, 28.0
"""How long the others may take until their next step, from a death of which they are told, and from a silent one.
Without the watch, a collective notices a silent death after 30 s."""


class ProgramError(Exception):
    """An exception in the body of a step."""


class Job(Simulation):
    """A few processes run `sl.steps`, with faults that are drawn from a seed.

    The gradient of a step counts the samples of its batches. So the only parameter says how often each sample was used.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        self.hosts = [Host(f"host{number}") for number in range(draw.choice([1, 1, 2, 3]))]
        self.size = draw.randint(2, 5)
        self.settings: dict[str, Any] = {
            "min_ranks": draw.choice([1, 1, 2]),
            "max_ranks": draw.choice([None, None, self.size + 1, max(2, self.size - 1)]),
            "needs_majority": draw.random() < 0.8,
            "keep_global_batch": draw.random() < 0.2,
        }
        if self.settings["keep_global_batch"]:
            self.settings["max_ranks"] = None
        self.step_seconds = draw.choice([0.05, 0.5])
        self.raising: set[int] = set()
        """The processes of whose programs the next step raises an exception."""
        self.committed: dict[tuple[str, int], list[float]] = {}
        self.own: dict[int, dict[int, list[float]]] = {}
        """The parameter after each step that a process has committed."""
        self.finals: dict[int, list[float]] = {}
        self.stepped_at = dict.fromkeys(range(self.size), 0.0)
        self.ends: dict[int, str] = {}
        self.faults: list[str] = []
        members = self.groups[""] = Group(self, self.size)
        for rank in range(self.size):
            host = self.hosts[rank * len(self.hosts) // self.size]
            self.start(host, rank, self.size, members)
        kinds = ["kill", "kill", "kill in change", "join", "raise"]
        kinds += draw.choice([[], ["lose host"] * 3, ["lose host", *UNTOLD]])
        for _ in range(draw.randint(0, 5)):
            self.at(draw.uniform(0, draw.choice([1, 8])), partial(self.fault, draw.choice(kinds)))

    def start(self, host: Host, rank: int, size: int, members: Group | None) -> None:
        """Start a rank; without a group, one that joins."""
        process = Process(self, host, self.program)
        cpu = torch.device("cpu")
        ranks = sl.World(
            rank=rank, size=size, local_rank=0, local_size=1, host=host.name, generation=0, device=cpu
        )
        process.session = SimulatedSession(process, ranks, members)

    # ------------------------------------------------------------------ faults

    def fault(self, kind: str) -> None:
        draw = self.random
        ranks = [one for one in self.processes.values() if one.is_alive and one.session is not None]
        if not ranks:
            return
        self.faults.append(kind)
        one, seconds = draw.choice(ranks), draw.uniform(0, 20)
        death = int(10 ** draw.uniform(0, 2.5)), draw.random() < 0.5
        if kind == "kill":
            one.death = death
        elif kind == "kill in change":
            one.death_in_change = death
        elif kind == "raise":
            self.raising.add(one.pid)
        elif kind == "join":
            if self.store.check(["loop", "members 1/generation 0"]):
                self.start(draw.choice([host for host in self.hosts if not host.is_lost]), 0, 1, None)
        elif kind == "lose host":
            one.host.is_lost = True
            for other in ranks:
                if other.host is one.host:
                    other.kill()
        elif kind == "cut host":
            one.host.cut_until = self.now + seconds
        elif kind == "cut store":
            one.cut_until = self.now + seconds
        elif kind == "stop":
            one.stopped_until = self.now + seconds
        elif kind == "stop store":
            self.store_stopped_until = self.now + seconds
        else:
            self.store_has_ended = True

    # ------------------------------------------------------------------ a process

    def program(self, process: Process) -> None:
        """What the main thread of a rank does."""
        try:
            used = nn.Module()
            used.counts = nn.Parameter(torch.zeros(NUM_SAMPLES + 1, dtype=torch.float64))
            ddp = sl.DistributedDataParallel(used)
        except SynclineError as error:  # before the loop, each loss ends the job
            self.ends[process.pid], process.end_seen = "was not begun", type(error)
            return
        try:
            self.train(process, ddp)
            end = "done"
        except (PeerLost, NotNeeded, PeerFailed, ProgramError) as error:
            end, process.end_seen = type(error).__name__, PeerFailed  # its excepthook says so to the others
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{process} ends with {error!r}") from error
        self.ends[process.pid] = end

    def train(self, process: Process, ddp: sl.DistributedDataParallel) -> None:
        counts: Any = ddp.module.counts
        optimizer = torch.optim.SGD([counts], lr=1.0)
        sampler = sl.DistributedSampler(range(NUM_SAMPLES), shuffle=False, drop_last=True)
        state = sl.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
        data: DataLoader[int] = DataLoader(range(NUM_SAMPLES), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
        riders = inside.replica_of(ddp).gradients.riders  # type: ignore[union-attr]
        loop: Any = sl.steps(state, UNTIL, data=data, on_straggler=None, **self.settings)
        with contextlib.closing(loop):
            for step in loop:
                with step:
                    sleep(self.delay(self.step_seconds))
                    several = self.settings["keep_global_batch"]
                    batches = step.batches(are_means=False) if several else [step.next_batch()]
                    sums = torch.zeros(NUM_SAMPLES + 2, dtype=torch.float64)
                    for batch in batches:
                        sums[batch] += 1
                    sums[-2] = process.session.world().rank == 0
                    # The only rider that the loop waits for, without the backward.
                    sums[-1] = riders.newcomers.word(None)
                    process.session.transport.all_reduce(sums).wait()
                    riders.newcomers.are_waiting |= bool(sums[-1])
                    counts.grad = -sums[:-1]
                    if process.pid in self.raising:
                        raise ProgramError
                    optimizer.step()
                    if step.number % 3 == 0:  # a loss that is noticed after the optimizer's step
                        process.session.transport.barrier().wait()
                if step.is_committed:
                    self.check_step(process, step.number, counts.tolist())
        if state.step != UNTIL:
            raise Broken(f"{process} ends its loop after step {state.step}")
        self.finals[process.pid] = counts.tolist()

    # ------------------------------------------------------------------ invariants

    def check_step(self, process: Process, number: int, counts: list[float]) -> None:
        where, num_used = f"{process} after step {number}", int(sum(counts[:-1]))
        self.check_time(process)
        own = self.own.setdefault(process.pid, {})
        if number <= max(own, default=0):
            raise Broken(f"{where}: it had committed step {max(own)} already")
        own[number] = counts
        if counts[-1] != number:
            raise Broken(f"{where}: the optimizers have made {counts[-1]:g} steps")
        if counts[:-1] != [1.0] * num_used + [0.0] * (NUM_SAMPLES - num_used):
            raise Broken(f"{where}: samples were lost, or used twice: {counts[:-1]}")
        if self.settings["keep_global_batch"] and num_used != number * self.size * BATCH:
            raise Broken(f"{where}: {num_used} samples were used")
        if self.committed.setdefault((process.session.key, number), counts) != counts:
            raise Broken(f"{where}: the parameters of two members differ")

    def check_time(self, process: Process) -> None:
        """Deaths do not cost the others much longer than they need to notice them."""
        before, self.stepped_at[process.pid] = self.stepped_at.get(process.pid, self.now), self.now
        limit_seconds = (
            TOLD_SECONDS if self.are_told() else SILENT_SECONDS if self.are_told("lose host") else math.inf
        )
        if (seconds := self.now - max(before, self.died_at)) > limit_seconds:
            raise Broken(f"{process} made no step for {seconds:.2f} s after the last step or death")

    def are_told(self, *also: str) -> bool:
        """Whether the processes are told of all faults so far, but for these."""
        return {*self.faults} <= {"kill", "kill in change", "join", "raise", *also}

    def check_end(self) -> None:
        """All that finish have made the same steps, and some finish if all ends are known."""
        for number in range(1, UNTIL + 1):
            found = [own[number] for pid, own in self.own.items() if pid in self.finals and number in own]
            if any(counts != found[0] for counts in found):
                raise Broken(f"processes that finish have made different steps {number}")
        if any(counts != found[0] for counts in self.finals.values()):
            raise Broken("processes finish with different parameters")
        if "PeerFailed" in self.ends.values() and self.faults.count("raise") < 2:
            raise Broken(f"a process says that the program is at fault: {self.ends}")
        is_at_fault = {"PeerFailed", "ProgramError"} & {*self.ends.values()}
        if self.are_told() and not self.finals and not is_at_fault and self.left():
            raise Broken(f"{self.left()} could have finished: {self.ends}")

    def left(self) -> list[Process]:
        """The members with the state of the training that were not killed; none if they are too few."""
        firsts = range(min(self.size, self.settings["max_ranks"] or self.size))
        left = [
            self.processes[pid]
            for pid in {*firsts, *self.own}
            if self.processes[pid].end_seen is not PeerLost
        ]
        return left if len(left) >= self.settings["min_ranks"] else []


def check(seed: int, world: type[World] = World) -> World:
    """Run one world. Raise `Broken`, with the seed, if an invariant does not hold."""
    try:
        found = world(seed)
        found.run()
        found.check_end()
    except Broken as error:
        raise Broken(f"seed {seed}: {error}") from None
    return found


def check_job(seed: int, job: type[Job] = Job) -> Job:
    """Run `sl.steps` once. Raise `Broken`, with the command that repeats it, if an invariant does not hold."""
    found = job(seed)
    with simulated():
        try:
            found.run(LIMIT_SECONDS)
            found.check_end()
        except Broken as error:
            command = (
                f"{PATIENCE}={patience(1.0):g} PYTHONPATH=tests python {FILE} --steps --runs 1 --seed {seed}"
            )
            raise Broken(f"{error}; faults: {found.faults}; run it again: {command}") from error
        finally:
            found.end()
    return found


def main() -> None:
    """Run many worlds, or with --steps `sl.steps`: `PYTHONPATH=tests python tests/unit/membership_simulation.py`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", action="store_true", help="with the real code of sl.steps")
    arguments = parser.parse_args()
    ends: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        ends.update((check_job(seed).ends if arguments.steps else check(seed).ended).values())
    print(f"{arguments.runs} runs, no invariant broken. How processes ended:")
    for how, number in ends.most_common():
        print(f"{number:9}  {how}")


if __name__ == "__main__":
    main()
