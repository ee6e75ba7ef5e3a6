"""A job of `sl.steps` whose ranks are threads, and in which ranks are lost and join at planned places.

The loop, the steps and all that follows a change of the ranks are the product's. Only the group is another one: its
processes are threads, so they need no store, no signs of life and no patience to agree on who is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hangs import HANG_SECONDS
from support.faulty import Fault, FaultyTransport
from syncline import CollectiveTimeout, PeerFailed, PeerLost, UnevenInputs
from syncline.resilience.membership import Membership, Observation, Report, Rules, next_membership
from syncline.transport import ThreadGroup, Transport, run_ranks

__all__ = ["Job", "Killed", "Process", "dies_at"]

_RULES = Rules(needs_majority=False)

_PLACES = {
    "world": ("steps", "training", "slow_ranks"),
    "transport_of": ("training", "parts"),
    "is_about_to_join": ("parts",),
    "Group": ("steps",),
}
"""The names of the session that `sl.steps` uses, and where."""

_here = threading.local()


class Killed(Exception):
    """The end of a process that is lost."""


def dies_at(rank: int, operation: str, call: int) -> Fault:
    """Return a fault that ends a rank when it starts this call of an operation, from 0."""
    return Fault(rank=rank, operation=operation, call=call, error=Killed(f"{operation} {call}"))


class Process:
    """One process of a job: its place among the others, and what `sl.steps` knows as its group."""

    change, num_lost, is_left_behind = "", 0, False

    def __init__(self, job: Job, name: str, transport: Transport, *, joins: bool) -> None:
        self.name = name
        self.transport = transport
        self.joins = joins
        self.first_size = transport.size
        self._job = job

    def let_newcomers_in(self) -> None:
        """Let processes that wait join after this step, or after the next sync."""
        self._job.is_open = True

    # ------------------------------------------------------------------ called by `sl.steps`

    def begin(self) -> Membership | None:
        return self.agree(-1, None) if self.joins else None

    def someone_waits(self) -> bool:
        return self._job.is_open

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, PeerLost | PeerFailed | CollectiveTimeout | UnevenInputs)

    def agree(self, num_commits: int, loss: Exception | None) -> Membership:
        if loss is not None:
            self.transport.abort(f"it stops: {loss}")
        return self._job.agree(Report(self.name, num_commits))

    def connect(self, membership: Membership) -> None:
        self.joins = False
        self.transport = self._job.transport(membership.generation, membership.members.index(self.name))

    def settle(self) -> None:
        pass

    def wait_for_all(self) -> Exception | None:
        try:
            self.transport.barrier().wait()
        except Exception as error:
            if not self.is_loss(error):
                raise
            return error
        return None

    def end_by_fault(self, step: int, error: BaseException) -> None:
        pass

    def check_faults(self, step: int, loss: Exception) -> None:
        pass

    def leave(self, *, is_closed: bool) -> None:
        pass


class Job:
    """The processes of a job.

    Args:
        size: the number of processes with which it begins. Their names are "0", "1" and so on.
        num_joining: the number of processes that wait until `Process.let_newcomers_in`.
        faults: the faults of each generation of ranks. The first generation is 0, and each change begins another one.
    """

    def __init__(
        self, size: int, *, num_joining: int = 0, faults: Mapping[int, Sequence[Fault]] | None = None
    ) -> None:
        self.is_open = False
        """Whether the processes that wait are let in at the next change."""
        self._faults = faults or {}
        self._names = [str(number) for number in range(size + num_joining)]
        members = tuple(self._names[:size])
        self._joining = frozenset(self._names[size:])
        self._current = Membership(0, members, step=0, sources=members)
        self._reports: dict[str, Report] = {}
        self._ended: set[str] = set()
        self._groups = {0: ThreadGroup(size)}
        self._changed = threading.Condition()

    def transport(self, generation: int, rank: int) -> Transport:
        """Return the transport of a rank in a generation, with its faults."""
        with self._changed:
            inner = self._groups[generation].transport(rank)
        faults = self._faults.get(generation, ())
        return FaultyTransport(inner, faults) if faults else inner

    def agree(self, report: Report) -> Membership:
        """Wait until all processes have reported or ended, and return who is left.

        Raises:
            Killed: the process is not needed any more.
        """
        with self._changed:
            self._reports[report.member] = report
            self._decide()

            def is_decided() -> bool:
                return report.member not in self._reports or self._ended.issuperset(self._current.members)

            if not self._changed.wait_for(is_decided, HANG_SECONDS):
                raise TimeoutError(f"{report} waits for {self._current}, without {self._ended}")
            if report.member in self._reports:
                raise Killed("the others have ended")
            return self._current

    def _decide(self) -> None:
        members = {*self._current.members, *(self._joining if self.is_open else ())}
        if not members <= self._reports.keys() | self._ended:
            return
        reports = {name: self._reports[name] for name in members - self._ended}
        found = next_membership(
            self._current, Observation(reports, frozenset(self._ended)), _RULES, waited_seconds=0.0
        )
        if isinstance(found, Membership):
            self._current, self.is_open = found, False
            self._groups[found.generation] = ThreadGroup(len(found.members))
            for name in members - self._ended:
                del self._reports[name]
        self._changed.notify_all()

    def run(self, program: Callable[[Process], Any]) -> dict[str, Any]:
        """Run a program on all processes. Return for each, by its name, what it has returned or raised."""
        outcomes: dict[str, Any] = {}

        def run_one(name: str) -> None:
            joins = name in self._joining
            alone = ThreadGroup(1).transport(0)
            _here.process = process = Process(
                self, name, alone if joins else self.transport(0, int(name)), joins=joins
            )
            try:
                outcomes[name] = program(process)
            except Exception as error:
                outcomes[name] = error
                process.transport.abort(f"process {name} has ended: {error!r}")
            with self._changed:
                self._ended.add(name)
                self._decide()
                self._changed.notify_all()

        stands_for: dict[str, Any] = {
            "world": lambda: SimpleNamespace(rank=_transport().rank, size=_transport().size),
            "transport_of": lambda group: _transport(),
            "is_about_to_join": lambda: _here.process.joins,
            "Group": lambda rules: _here.process,
        }
        with ExitStack() as stack:
            for name, rooms in _PLACES.items():
                for room in rooms:
                    stack.enter_context(mock.patch(f"syncline.resilience.{room}.{name}", stands_for[name]))
            run_ranks(len(self._names), lambda t: run_one(self._names[t.rank]))
        return outcomes


def _transport() -> Transport:
    transport: Transport = _here.process.transport
    return transport
