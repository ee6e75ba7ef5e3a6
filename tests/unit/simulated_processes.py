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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from support import inside
from syncline.environment import patience
from syncline.errors import PeerLost, SynclineError, UnevenInputs
from syncline.liveness import RankProcess, StoreConnection, StoreSilent
from syncline.resilience import group, register, watch

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
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(milliseconds=1))  # what is missing then does not come by waiting
        self.store_stopped_until = 0.0
        self.store_has_ended = False
        self.processes: dict[int, Process] = {}
        self.groups: dict[str, Any] = {}
        """The connections between the members of each generation; see simulated_transport.py."""
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
        answer_seconds: float = patience(5.0),
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


# ---------------------------------------------------------------------- what a process sees


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
