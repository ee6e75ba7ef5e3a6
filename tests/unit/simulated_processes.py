"""Processes that run the real code of `sl.steps` under a virtual clock: each of their threads is a greenlet.

Where the product blocks (a request to the store, a sleep, a wait for a thread, for ranks or for a collective), the
thread waits in `Thread.wait`. There, its process may be stopped or killed. The store is one of torch. Requests and
answers travel for a while, and the way to the store can be cut, its process can be stopped, and it can end. The
connections between the ranks, the states of processes and the launchers are simulated.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from support import inside
from syncline._torch.process_groups import HashStore
from syncline.environment import patience
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError, UnevenInputs
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure
from syncline.liveness.connection import ANSWER_SECONDS, StoreConnection, StoreSilent
from syncline.liveness.health import CLOSED, Lane
from syncline.liveness.processes import RankProcess
from syncline.resilience import group, register, watch
from syncline.session.ranks import World
from syncline.transport import Transport, Work
from syncline.transport.base import ReduceOp
from syncline.transport.c10d_groups import fill
from syncline.transport.threads import ThreadGroup
from syncline.transport.watched import WatchedTransport, health_of_group

TIMEOUT_SECONDS = 30.0
"""The timeout of `sl.init`."""

Resume = Callable[[Any], None]


class Broken(AssertionError):
    """An invariant does not hold."""


class Killed(BaseException):
    """Ends each thread of a process that was killed, wherever it waits."""


class Simulation:
    """The clock, the store and all processes of one run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.order = itertools.count()
        self.store = HashStore()
        self.store.set_timeout(timedelta(milliseconds=1))  # what is missing then does not come by waiting
        self.store_stopped_until = 0.0
        self.store_has_ended = False
        self.processes: dict[int, Process] = {}
        self.groups: dict[str, Group] = {}
        self.memberships: dict[str, Sequence[int]] = {}
        """The members of each generation."""
        self.died_at = 0.0
        """When a process was killed, or has ended by an error, last."""

    def at(self, seconds: float, happen: Callable[[], object]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), happen))

    def delay(self, longest_seconds: float = 0.02) -> float:
        return self.random.uniform(0, longest_seconds)

    def end(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()
            process.bury()

    def run(self, limit_seconds: float) -> None:
        """Let everything happen, until all processes have ended."""
        while running := [one for one in self.processes.values() if one.is_alive]:
            while self.events and self.processes[running[0].pid].is_alive:
                self.now, _, happen = heapq.heappop(self.events)
                if self.now > limit_seconds:
                    raise Broken(f"no end after {self.now:.0f} s: {', '.join(map(str, running))} still run")
                happen()
            if not self.events and running[0].is_alive:
                raise Broken(f"{running[0]} waits for what never comes")


@dataclass(eq=False)
class Host:
    name: str
    cut_until: float = 0.0
    """Until when it is cut off from the other hosts."""
    is_lost: bool = False
    """Whether all of it has ended at once, so that no connection was closed."""


class Process:
    """A rank's process.

    Args:
        simulation: the run.
        host: its host.
        program: what its main thread does.
    """

    def __init__(self, simulation: Simulation, host: Host, program: Callable[[Process], object]) -> None:
        self.simulation, self.host = simulation, host
        self.pid = len(simulation.processes)
        simulation.processes[self.pid] = self
        self.name = ""
        """Its name in `sl.steps`, which it writes down for its launcher, as long as it is in the loop."""
        self.came_to_steps = False
        self.session: Any = None
        self.is_alive = True
        self.end_seen: type[SynclineError] = UnevenInputs
        """What its end is to the others, if they wait for it."""
        self.stopped_until = self.cut_until = 0.0
        """Until when it is stopped, and until when it cannot reach the store."""
        self.death: tuple[int, bool] | None = None
        """In how many waits it is killed, and whether it has sent then what it waits for."""
        self.death_in_change: tuple[int, bool] | None = None
        """The same, from the beginning of its next change of the ranks on."""
        self.threads: list[Thread] = []
        self.start_thread(self._run, (program,))

    def __repr__(self) -> str:
        return f"process {self.pid} on {self.host.name}"

    def _run(self, program: Callable[[Process], object]) -> None:
        program(self)
        self._end()

    def start_thread(self, target: Callable[..., object], args: tuple[Any, ...] = ()) -> Thread:
        self.threads.append(thread := Thread(self, target, args))
        self.simulation.at(self.simulation.delay(), partial(thread.resumer(), None))
        return thread

    def counts_down(self) -> bool | None:
        """Count a wait. Return whether what is waited for is sent before the process is killed in it; else None."""
        if self.death is not None:
            number, is_sent = self.death
            self.death = number - 1, is_sent
            return is_sent if number <= 0 else None
        return None

    def kill(self) -> None:
        """Kill the process now."""
        if self.is_alive:
            self.end_seen = PeerLost
            self._end()

    def _end(self) -> None:
        self.is_alive = False
        if self.end_seen is not UnevenInputs:
            self.simulation.died_at = self.simulation.now
        for members in self.simulation.groups.values():
            for transport in members.transports.values():
                if transport.process is self:
                    members.lose(transport.rank, self.end_seen)
        if self.session is not None and not self.came_to_steps and not self.session.has_begun_alone:
            self.simulation.at(self.simulation.delay(1.0), self.simulation.end)  # the launcher ends the job
        if self.name and not self.host.is_lost:
            self.simulation.at(self.simulation.delay(1.0), self._record_lost)
        self.simulation.at(0, self.bury)

    def _record_lost(self) -> None:
        """Let the launcher of this host write into the store that the process has ended in the loop."""

        def record(launcher: Process) -> None:
            with contextlib.suppress(PeerLost):
                register.Line(self.simulation.store, register.SILENT_SECONDS).record_lost(self.name)

        if not self.host.is_lost:
            Process(self.simulation, self.host, record)

    def bury(self) -> None:
        for thread in self.threads:
            if thread and not thread.dead:
                inside.set_session(self.session)
                thread.throw(Killed)


class Thread(greenlet):  # type: ignore[misc]
    """A thread of a process."""

    def __init__(self, process: Process, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        super().__init__(parent=getcurrent() if not isinstance(getcurrent(), Thread) else getcurrent().parent)
        self.process, self.target, self.args = process, target, args

    def run(self, _: object) -> None:
        with contextlib.suppress(Killed):
            self.target(*self.args)

    def resumer(self) -> Resume:
        """Return a function that lets this thread go on, once, with the result of its wait."""
        process, simulation, is_over = self.process, self.process.simulation, False

        def resume(value: Any) -> None:
            nonlocal is_over
            if is_over or not process.is_alive:
                return
            if process.stopped_until > simulation.now:
                simulation.at(process.stopped_until - simulation.now, partial(resume, value))
                return
            is_over = True
            inside.set_session(process.session)
            self.switch(value)

        return resume

    def wait(self, begin: Callable[[Resume], object]) -> Any:
        """Wait for the result that `begin`'s argument gets; an exception is raised. The process may be killed here."""
        process, computes_gradients = self.process, torch.is_grad_enabled()
        is_sent = process.counts_down()
        if is_sent is False:
            process.kill()
        if process.is_alive:
            begin(self.resumer())
        if is_sent:
            process.kill()
        if not process.is_alive:
            raise Killed
        value = self.parent.switch()
        torch.set_grad_enabled(computes_gradients)
        if isinstance(value, BaseException):
            raise value
        return value


def here() -> Thread:
    thread = getcurrent()
    assert isinstance(thread, Thread), "only threads of simulated processes wait"
    return thread


def clock() -> float:
    return here().process.simulation.now


def sleep(seconds: float) -> None:
    """Sleep. A busy host wakes a thread up late, so a short sleep does not end at once."""
    thread = here()
    simulation = thread.process.simulation
    thread.wait(lambda resume: simulation.at(max(seconds, 0.05) + simulation.delay(), partial(resume, None)))


class Event:
    """In the place of threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Resume] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for resume in self._waiting:
            resume_soon(resume)

    def wait(self, timeout: float) -> bool:
        thread = here()
        if not self._is_set:

            def begin(resume: Resume) -> None:
                self._waiting.append(resume)
                thread.process.simulation.at(timeout, partial(resume, None))

            thread.wait(begin)
            self._waiting.clear()
        return self._is_set


def resume_soon(resume: Resume) -> None:
    thread = getcurrent()
    if isinstance(thread, Thread):
        thread.process.simulation.at(0, partial(resume, None))


class ThreadHandle:
    """In the place of threading.Thread."""

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool
    ) -> None:
        self._target, self._args = target, args
        self._over = Event()

    def start(self) -> None:
        here().process.start_thread(self._run)

    def _run(self) -> None:
        self._target(*self._args)
        self._over.set()

    def join(self, timeout: float) -> None:
        self._over.wait(timeout)


# ---------------------------------------------------------------------- the store


@dataclass
class _Line:
    """A connection to the store."""

    is_closed: bool = False
    silent_until: float = 0.0


class Connection(StoreConnection):
    """A connection to the store, over which requests and answers travel for a while."""

    def __init__(
        self,
        store: Any,
        timeout: timedelta | None = None,
        *,
        silence_seconds: float = 4.0,
        answer_seconds: float = ANSWER_SECONDS,
        note_silence: object = None,
    ) -> None:
        self.store = store
        self.line = _Line()
        self.silence_seconds, self.answer_seconds = silence_seconds, answer_seconds

    def ask(
        self, request: Callable[[], Any], wait_seconds: float, meanwhile: Callable[[], object] | None = None
    ) -> Any:
        thread = here()
        process, simulation, line = thread.process, thread.process.simulation, self.line
        begun = simulation.now
        if line.is_closed or simulation.store_has_ended:
            raise dist.DistNetworkError("the store has closed the connection")
        if line.silent_until > begun:
            raise StoreSilent("the store has not answered an earlier request yet")

        def travel(resume: Resume, then: Callable[[], object]) -> None:
            cut_seconds = max(process.cut_until, process.host.cut_until) - simulation.now
            if cut_seconds > self.silence_seconds:
                line.is_closed = True
                error = dist.DistNetworkError("the network to the store fails")
                simulation.at(self.silence_seconds, partial(resume, error))
            else:
                simulation.at(max(0.0, cut_seconds) + simulation.delay(), then)

        def arrive(resume: Resume) -> None:
            stopped_until = simulation.store_stopped_until
            if stopped_until > simulation.now:
                if stopped_until > begun + self.answer_seconds:
                    line.silent_until = stopped_until
                    error = StoreSilent("the store does not answer")
                    simulation.at(
                        max(0.0, begun + self.answer_seconds - simulation.now), partial(resume, error)
                    )
                simulation.at(stopped_until - simulation.now, partial(arrive, resume))
                return
            result: Any
            try:
                result = request()
            except Exception as error:
                result = error
            travel(resume, partial(resume, result))

        return thread.wait(lambda resume: travel(resume, partial(arrive, resume)))


# ---------------------------------------------------------------------- the ranks of one generation


@dataclass(eq=False)
class _Call:
    """A collective or a message."""

    ranks: Sequence[int]
    compute: Callable[[list[Any]], Any]
    parts: dict[int, Any] = field(default_factory=dict)
    works: dict[int, SimulatedWork] = field(default_factory=dict)


class SimulatedWork(Work):
    """What one rank waits for. Its result is the same for all ranks, or a list with one for each."""

    def __init__(self, transport: SimulatedTransport, target: torch.Tensor | None) -> None:
        self.transport, self.target = transport, target
        self.result: Any = None
        self.is_over = False
        self.resume: Resume | None = None

    def end(self, result: Any) -> None:
        if not self.is_over:
            self.is_over, self.result = True, result
            if self.resume is not None:
                self.transport.simulation.at(0, partial(self.resume, None))

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout_seconds: float | None = None) -> None:
        seconds = self.transport.timeout_seconds if timeout_seconds is None else timeout_seconds

        def begin(resume: Resume) -> None:
            self.resume = resume
            late = Failure(CollectiveTimeout, f"waited {seconds:g} s for the other ranks")
            self.transport.simulation.at(seconds, partial(self.end, late))

        if not self.is_over:
            here().wait(begin)
        if isinstance(self.result, Failure):
            raise self.transport.health.failed(self.result)
        if self.target is not None and self.result is not None:
            fill(self.target, self.result)


class Group:
    """The connections between the members of one generation.

    Args:
        simulation: the run.
        size: the number of members.
    """

    def __init__(self, simulation: Simulation, size: int) -> None:
        self.simulation, self.size = simulation, size
        self.transports: dict[int, SimulatedTransport] = {}
        self._calls: dict[object, _Call] = {}
        self._gone: dict[int, type[SynclineError]] = {}

    def start(
        self,
        transport: SimulatedTransport,
        key: object,
        ranks: Sequence[int],
        part: Any,
        compute: Callable[[list[Any]], Any],
        target: torch.Tensor | None,
    ) -> Work:
        call = self._calls.setdefault(key, _Call(ranks, compute))
        work = call.works[transport.rank] = SimulatedWork(transport, target)
        self.travel(transport, partial(self._arrive, call, transport, part))
        for rank, kind in self._gone.items():
            if rank in ranks and rank not in call.parts:
                self._fail(work, rank, kind)
        return work

    def travel(self, transport: SimulatedTransport, then: Callable[[], object]) -> None:
        cut_seconds = transport.process.host.cut_until - self.simulation.now if self.size > 1 else 0.0
        self.simulation.at(max(0.0, cut_seconds) + self.simulation.delay(), then)

    def _arrive(self, call: _Call, transport: SimulatedTransport, part: Any) -> None:
        is_sent = transport.process.is_alive or self.simulation.random.random() < 0.5
        if is_sent:
            call.parts[transport.rank] = part
        if len(call.parts) == len(call.ranks):
            result = call.compute([call.parts[rank] for rank in call.ranks])
            for rank, work in call.works.items():
                own = result[rank] if isinstance(result, list) else result
                # One member can have stepped for a while before the next one learns that it may step.
                late = self.simulation.delay(self.simulation.random.choice([0.01, 0.01, 0.01, 0.01, 0.3]))
                self.simulation.at(late, partial(self.travel, work.transport, partial(work.end, own)))

    def lose(self, rank: int, kind: type[SynclineError]) -> None:
        """The connections of a member are closed: a member that waits for it fails, if it has not all that it needs."""
        if rank in self._gone or self.transports[rank].process.host.is_lost:
            return
        self._gone[rank] = kind
        for call in self._calls.values():
            if rank in call.ranks:
                for work in call.works.values():
                    is_whole = rank in call.parts and (
                        kind is UnevenInputs or self.simulation.random.random() < 0.5
                    )
                    if not work.is_over and not is_whole:
                        self._fail(work, rank, kind)

    def _fail(self, work: SimulatedWork, rank: int, kind: type[SynclineError]) -> None:
        text = (
            f"rank {rank} {'has shut down normally' if kind is UnevenInputs else 'has closed the connection'}"
        )
        end = partial(work.end, Failure(kind, text))
        self.simulation.at(self.simulation.delay(0.2), partial(self.travel, work.transport, end))

    def inform(self, transport: SimulatedTransport, failure: Failure) -> None:
        """The group has failed on one member, which says so to the others."""
        self._end_works(transport, failure)
        for other in self.transports.values():
            if other is not transport:
                told = Failure(failure.kind, failure.text, aborted_by=transport.rank)
                travel = partial(self.travel, other, partial(self._hear, other, told))
                self.simulation.at(0, partial(self.travel, transport, travel))

    def _hear(self, transport: SimulatedTransport, failure: Failure) -> None:
        transport.health.adopt(failure)
        self._end_works(transport, failure)

    def _end_works(self, transport: SimulatedTransport, failure: Failure) -> None:
        for call in self._calls.values():
            work = call.works.get(transport.rank)
            if work is not None:
                work.end(failure)


class SimulatedTransport(WatchedTransport):
    """The connections of one member of a generation to the others."""

    def __init__(self, members: Group, process: Process, rank: int) -> None:
        lane = Lane(MAIN_LANE, None)
        settings: dict[str, Any] = {"rank": rank, "size": members.size, "timeout_seconds": TIMEOUT_SECONDS}
        super().__init__(health_of_group(lane, Board(), backend="simulated", **settings), lane, **settings)
        self.members, self.process, self.simulation = members, process, process.simulation
        self._num_calls: Counter[object] = Counter()
        self.health.on_failure.append(lambda failure: members.inform(self, failure))
        members.transports[rank] = self

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def sees_calls(self) -> bool:
        return True

    def split(self, color: int | None) -> Transport | None:
        raise NotImplementedError("no strategy of the simulation divides its ranks")

    def _release(self) -> None:
        self.members.lose(self.rank, UnevenInputs if self.health.failure is CLOSED else PeerLost)

    def _start(
        self,
        part: torch.Tensor | None,
        compute: Callable[[list[Any]], Any],
        target: torch.Tensor | None = None,
        ranks: tuple[int, ...] = (),
    ) -> Work:
        self._check_usable()
        self._num_calls[ranks] += 1
        part = None if part is None else part.detach().flatten().clone()
        key = ranks, self._num_calls[ranks]
        return self.members.start(self, key, sorted(ranks) or range(self.size), part, compute, target)

    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, terms: int = 0) -> Work:
        return self._start(tensor, partial(_reduced, op), tensor)

    def _start_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        return self._start(input, lambda parts: list(_reduced(op, parts).chunk(self.size)), output)

    def _start_all_gather(self, output: torch.Tensor, input: torch.Tensor, terms: int = 0) -> Work:
        return self._start(input, torch.cat, output)

    def _start_broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return self._start(tensor, lambda parts: parts[src], tensor)

    def _start_send(self, tensor: torch.Tensor, dst: int, terms: int = 0) -> Work:
        return self._start(tensor, _message, None, (self.rank, dst))

    def _start_recv(self, tensor: torch.Tensor, src: int, terms: int = 0) -> Work:
        return self._start(None, _message, tensor, (src, self.rank))

    def _start_barrier(self) -> Work:
        return self._start(None, lambda parts: None)


def _reduced(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    method = {"max": "amax", "min": "amin", "product": "prod"}.get(op, op)
    reduced: torch.Tensor = getattr(torch.stack(parts), method)(0)
    return reduced


def _message(parts: list[torch.Tensor | None]) -> torch.Tensor:
    (message,) = (part for part in parts if part is not None)
    return message


# ---------------------------------------------------------------------- what a process sees


class SimulatedSession:
    """The session of a process: its world, and how it gets another one.

    Args:
        process: the process.
        world: its world.
        members: the first group, to which it is connected; None in a process that joins.
    """

    def __init__(self, process: Process, world: World, members: Group | None) -> None:
        self._process, self._world = process, world
        self._alone = ThreadGroup(1).transport(0)
        self._transport = None if members is None else SimulatedTransport(members, process, world.rank)
        self.is_about_to_join = self.has_begun_alone = members is None
        self.key = ""
        """What its generation is called."""

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def transport(self) -> Transport:
        return self._alone if self._transport is None else self._transport

    def world(self) -> World:
        return self._world

    def transport_of(self, group: Any) -> Transport:
        return group if isinstance(group, Transport) else self.transport

    def job_store(self) -> Any:
        return self._process.simulation.store

    def timeout_seconds(self) -> float:
        return TIMEOUT_SECONDS

    def disconnect(self) -> None:
        if self._process.death_in_change is not None and self._process.death is None:
            self._process.death = self._process.death_in_change
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def regroup(
        self,
        key: str,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        connection: StoreConnection,
        has_ended: Callable[[Sequence[int]], list[int]],
        processes: Sequence[RankProcess | None],
    ) -> World:
        self.disconnect()
        simulation, self.key = self._process.simulation, key
        pids = [one.pid for one in processes if one is not None]
        if simulation.memberships.setdefault(key, pids) != pids:
            raise Broken(f"two memberships of {key}: {pids} and {simulation.memberships[key]}")
        self._world = replace(self._world, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
        members = simulation.groups.setdefault(key, Group(simulation, size))
        transport = SimulatedTransport(members, self._process, rank)
        deadline = simulation.now + patience(10.0)
        try:
            while len(members.transports) < size:
                if ended := has_ended([other for other in range(size) if other != rank]):
                    raise PeerLost(f"ranks {ended} have ended while the ranks connected to each other")
                if simulation.now > deadline:
                    raise CollectiveTimeout("not all ranks have connected")
                sleep(0.05)
        except BaseException:
            members.lose(rank, PeerLost)
            raise
        self._transport, self.is_about_to_join = transport, False
        return self._world


def _process_of(shown: RankProcess) -> Process:
    return here().process.simulation.processes[shown.pid]


def _note_name(process: Process, name: str | None) -> None:
    process.name, process.came_to_steps = name or "", True


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """In this block, `sl.steps` sees simulated processes. Other threads of this process see nothing of it."""
    time = SimpleNamespace(monotonic=clock, sleep=sleep)
    shown: dict[str, Any] = {
        "own": lambda: RankProcess(here().process.host.name, here().process.pid, 0),
        "has_ended": lambda self: not _process_of(self).is_alive,
        "is_stopped": lambda self: _process_of(self).stopped_until > clock(),
    }
    names = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{here().process.pid:08}"))
    with contextlib.ExitStack() as stack:
        for module, replaced in (
            (group, {"time": time, "uuid": names, "StoreConnection": Connection, "record_steps": _note_name}),
            (group, {"dist": SimpleNamespace(is_initialized=lambda: here().process.session.is_connected)}),
            (group, {"socket": SimpleNamespace(gethostname=lambda: here().process.host.name)}),
            (group, {"environment": SimpleNamespace(error_file=lambda: here().process)}),
            (register, {"time": time, "StoreConnection": Connection}),
            (watch, {"time": time, "threading": SimpleNamespace(Event=Event, Thread=ThreadHandle)}),
            (RankProcess, shown),
        ):
            stack.enter_context(mock.patch.multiple(module, **replaced))
        stack.enter_context(inside.any_session())
        yield
