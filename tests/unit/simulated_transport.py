"""The connections between simulated processes, and the session of each: see simulated_processes.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from simulated_processes import Broken, Process, Resume, Simulation, here, sleep

import syncline as sl
from syncline.environment import patience
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError, UnevenInputs
from syncline.liveness import Board, Failure, Health, Lane, RankProcess, StoreConnection
from syncline.transport import ReduceOp, ThreadGroup, Transport, Work
from syncline.transport.watched import MAIN_LANE, WatchedTransport  # type: ignore[attr-defined]

TIMEOUT_SECONDS = 30.0
"""The timeout of `sl.init`."""


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
            self.target.detach().view(-1).copy_(self.result)


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
        transport.health.adopted(failure)
        self._end_works(transport, failure)

    def _end_works(self, transport: SimulatedTransport, failure: Failure) -> None:
        transport.has_failed = True
        for call in self._calls.values():
            work = call.works.get(transport.rank)
            if work is not None:
                work.end(failure)


class SimulatedTransport(WatchedTransport):
    """The connections of one member of a generation to the others."""

    def __init__(self, members: Group, process: Process, rank: int) -> None:
        lane = Lane(MAIN_LANE, None)
        settings: dict[str, Any] = {"rank": rank, "size": members.size, "timeout_seconds": TIMEOUT_SECONDS}
        super().__init__(Health(lane, Board(), backend="simulated", **settings), lane, **settings)
        self.members, self.process, self.simulation = members, process, process.simulation
        self._num_calls: Counter[object] = Counter()
        self.has_failed = False
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
        self.members.lose(self.rank, PeerLost if self.has_failed else UnevenInputs)

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


class SimulatedSession:
    """The session of a process: its world, and how it gets another one.

    Args:
        process: the process.
        world: its world.
        members: the first group, to which it is connected; None in a process that joins.
    """

    def __init__(self, process: Process, world: sl.World, members: Group | None) -> None:
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

    def world(self) -> sl.World:
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
        connection: StoreConnection,
        has_ended: Callable[[Sequence[int]], list[int]],
        processes: Sequence[RankProcess | None],
        **place: int,
    ) -> sl.World:
        self.disconnect()
        simulation, self.key, rank, size = self._process.simulation, key, place["rank"], place["size"]
        pids = [one.pid for one in processes if one is not None]
        if simulation.memberships.setdefault(key, pids) != pids:
            raise Broken(f"two memberships of {key}: {pids} and {simulation.memberships[key]}")
        self._world = replace(self._world, **place)
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
