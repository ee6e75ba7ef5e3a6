"""Engine for several hosts with several ranks each: shared memory within a host, Gloo between hosts.

The leader of a host is its lowest rank. Data goes up to the leader through shared memory, across to the other leaders
through a process group of the leaders, and down again. So each byte crosses the network once per host, not once per
rank. Messages go directly: through shared memory to a rank of the same host, else through the transport beneath. That
transport also takes tensors that are not on the CPU, and provides notices, board and errors.

All ranks end with the same bits. Within a host, sums run in rank order; between hosts, the backend determines the
order. fp16 and bf16 are summed in fp32 and rounded within a host, then summed and rounded again between hosts. A mean
is the sum, divided at the end by the number of all ranks.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from threading import get_ident

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.errors import PeerFailed, SynclineError
from syncline.liveness.board import MAIN_LANE
from syncline.liveness.calls import Failure, lane_name
from syncline.liveness.health import CLOSED, Lane
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Team, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.c10d_groups import writing
from syncline.transport.hosts import (
    Hosts,
    host_key_or_random,
    raise_if_any,
    shared_memory_inside,
    trouble_on_host,
)
from syncline.transport.phases import Phase, PhasedWork, PhaseQueue
from syncline.transport.shared_memory.core import SharedMemoryUnavailable
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.transport.work import Work

_TOKEN_BYTES = 8

_TITLE = "shared memory within hosts"

_Start = Callable[[Transport], Work]
"""Starts one phase of an operation on the given part of the hierarchy."""


# ---------------------------------------------------------------------- the transport


class HierarchicalTransport(Transport):
    """This rank's side of a group on several hosts; created by `over`, on all ranks together.

    Args:
        beneath: the transport between all ranks.
        hosts: the ranks of each host.
        inside: the transport between the ranks of this host; None for a rank that is alone on its host.
        host: an additional key that distinguishes hosts, see `over`.
    """

    def __init__(
        self, beneath: C10dTransport, hosts: Hosts, inside: SharedMemoryTransport | None, host: str
    ) -> None:
        super().__init__(
            rank=beneath.rank,
            size=beneath.size,
            timeout_seconds=beneath.timeout_seconds,
            board=beneath.board,
        )
        self.health = beneath.health
        self.own_lane = beneath.own_lane
        self._hosts = hosts
        self._host = host
        self._own_host = hosts.host_of[self.rank]
        self._members = hosts.members[self._own_host]
        self._is_leader = self.rank == self._members[0]
        self._inside = inside
        self._lanes: list[HierarchicalTransport] = []
        self._num_lanes_for: Counter[str] = Counter()
        self._open(beneath, _TITLE)
        self.health.runs_over(self.name)

    def _open(self, beneath: C10dTransport, title: str) -> None:
        """Open the connections of one lane; a collective call that fails on all ranks or on none."""
        tokens = exchange(beneath, title, [], payload=secrets.token_bytes(_TOKEN_BYTES))
        leaders, name = self._hosts.leaders, self.own_lane.name
        self._beneath = beneath
        self._queue = PhaseQueue()
        self._is_closed = False
        self._up = self._down = self._across = None
        trouble = ""
        try:
            if self._inside is not None:
                self._up = self._inside.lane_agreed(f"{name}, up")
                self._down = self._inside.lane_agreed(f"{name}, down")
        except (SynclineError, MemoryError) as error:
            trouble = str(error) or type(error).__name__
        if self._is_leader:
            token = tokens[leaders[0]][:_TOKEN_BYTES]
            self._across = beneath.lane_among(leaders, f"{name}, across hosts", token)
        # A rank that closed the lane before all ranks are here would disconnect ranks that still connect.
        raise_if_any(beneath, trouble)
        if self._across is not None:
            self._across.forget_addresses()

    @staticmethod
    def over(beneath: C10dTransport, *, host: str = "") -> Transport:
        """Return the best transport for the ranks of `beneath`; a collective call.

        If all ranks are on one host, it is shared memory. If there are several hosts, at least one of them with several
        ranks, it is a hierarchy. If every rank has a host of its own, or if Gloo does not send the tensors on the CPU,
        it is `beneath` itself. Closing the result closes `beneath` as well.

        Args:
            beneath: the transport between the ranks.
            host: a key of this rank. Ranks with different keys do not use shared memory, even on one host.

        Raises:
            SharedMemoryUnavailable: ranks of one host cannot share memory. Raised on all ranks.
        """
        if beneath.size == 1:
            return beneath
        hosts = Hosts.of(beneath.all_gather_bytes(f"{host_key_or_random()} {host}".encode()))
        if len(hosts.members) == 1:
            return SharedMemoryTransport.over(beneath)
        if hosts.widest == 1 or not beneath.is_gloo_on_cpu:
            return beneath
        try:
            return HierarchicalTransport(beneath, hosts, shared_memory_inside(beneath, hosts), host)
        except SharedMemoryUnavailable:
            beneath.health.on_failure.clear()
            beneath.health.runs_over(beneath.name)
            raise

    @property
    def name(self) -> str:
        others = [f"{name} ({device})" for device, name in sorted(self._beneath.other_devices.items())]
        return ", ".join([f"shared memory within {len(self._hosts.members)} hosts, gloo across", *others])

    @property
    def group(self) -> ProcessGroup | None:
        return self._beneath.group

    # ------------------------------------------------------------------ reductions

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if not tensor.is_cpu:
            return self._beneath._start_all_reduce(tensor, op)
        return self._start("all_reduce", op, tensor, self._reduction(tensor, op))

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if not input.is_cpu:
            return self._beneath._start_reduce_scatter(output, input, op)
        whole = input.detach().reshape(-1).clone()
        mine = whole[self.rank * output.numel() : (self.rank + 1) * output.numel()]
        take = _local(partial(_fill, output, mine))
        return self._start("reduce_scatter", op, input, [*self._reduction(whole, op), take])

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        if not tensor.is_cpu:
            return self._beneath._start_reduce_spans(tensor, bounds, op)
        return self._start("reduce_spans", op, tensor, self._reduction(tensor, op))

    def _reduction(self, tensor: Tensor, op: ReduceOp) -> list[Phase]:
        part: ReduceOp = "sum" if op == "mean" else op
        return self._phases(
            lambda up: up._start_all_reduce(tensor, part),
            lambda across: across._start_all_reduce(tensor, part),
            lambda down: down._start_broadcast(tensor, 0),
            after_across=partial(_divide, tensor, self.size) if op == "mean" else None,
        )

    # ------------------------------------------------------------------ data

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if not input.is_cpu:
            return self._beneath._start_all_gather(output, input)
        hosts, mine, everyone = self._hosts, _as_bytes(input), _as_bytes(output)
        of_host = torch.empty(hosts.widest * mine.numel(), dtype=torch.uint8)
        here = of_host[: len(self._members) * mine.numel()]
        if self._up is None:
            here.copy_(mine)
        whole, sort = everyone, None
        if self._across is not None and not hosts.is_even:
            whole = torch.empty(len(hosts.members) * of_host.numel(), dtype=torch.uint8)
            sort = partial(hosts.put_in_rank_order, everyone, whole)
        phases = self._phases(
            lambda up: up._start_all_gather(here, mine),
            lambda across: across._start_all_gather(whole, of_host),
            lambda down: down._start_broadcast(everyone, 0),
            after_across=sort,
        )
        return self._start("all_gather", "", input, phases)

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if not tensor.is_cpu:
            return self._beneath._start_broadcast(tensor, src)
        host = self._hosts.host_of[src]
        is_here = host == self._own_host
        phases = self._phases(
            (lambda up: up._start_broadcast(tensor, self._members.index(src))) if is_here else None,
            lambda across: across._start_broadcast(tensor, host),
            None if is_here else (lambda down: down._start_broadcast(tensor, 0)),
        )
        return self._start("broadcast", f"from rank {src}", tensor, phases)

    def _start_send(self, tensor: Tensor, dst: int) -> Work:
        self._check_that_it_is_usable()
        if tensor.is_cpu and self._up is not None and dst in self._members:
            return self._up._start_send(tensor, self._members.index(dst))
        return self._beneath._start_send(tensor, dst)

    def _start_recv(self, tensor: Tensor, src: int) -> Work:
        self._check_that_it_is_usable()
        if tensor.is_cpu and self._up is not None and src in self._members:
            return self._up._start_recv(tensor, self._members.index(src))
        return self._beneath._start_recv(tensor, src)

    def _start_barrier(self) -> Work:
        def start(part: Transport) -> Work:
            return part._start_barrier()

        return self._start("barrier", "", None, self._phases(start, start, start))

    def _phases(
        self,
        up: _Start | None,
        across: _Start,
        down: _Start | None,
        *,
        after_across: Callable[[], object] | None = None,
    ) -> list[Phase]:
        """Return the phases of an operation in which this rank takes part.

        Args:
            up: starts the phase towards the leader of the host; None if there is none.
            across: starts the phase between the leaders.
            down: starts the phase from the leader of the host; None if there is none.
            after_across: a local step of the leaders.
        """
        phases = []
        if self._up is not None and up is not None:
            phases.append(Phase("up", partial(up, self._up)))
        if self._across is not None:
            phases.append(Phase("across", partial(across, self._across)))
            if after_across is not None:
                phases.append(_local(after_across))
        if self._down is not None and down is not None:
            phases.append(Phase("down", partial(down, self._down)))
        return phases

    def _start(self, operation: str, detail: str, tensor: Tensor | None, phases: list[Phase]) -> Work:
        self._check_that_it_is_usable()
        self.own_lane.num_started += 1
        work = PhasedWork(self, operation, detail, tensor)
        self._queue.add(work, phases)
        return work

    def _check_that_it_is_usable(self) -> None:
        health, thread = self.health, get_ident()
        if health.failure is not None:
            raise health.error()
        if self._is_closed or health.has_lost_its_group():
            raise CLOSED.on_rank(self.rank)
        if thread != health.calling_thread:
            health.called_from(thread)

    # ------------------------------------------------------------------ memory

    @property
    def reduces_in_place(self) -> bool:
        return True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return super().allocate(numel, dtype, device)
        lines = [f"{numel} elements of {dtype}"]
        token, *_ = exchange(self, "allocate", lines, payload=secrets.token_bytes(_TOKEN_BYTES))
        if self._inside is None:
            make = partial(super().allocate, numel, dtype, device)
        else:
            make = partial(self._inside.allocate_agreed, numel, dtype, token)
        return self._made_on_all_hosts(make)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if not self._has_teams(device):
            return None
        assert self._inside is not None
        exchange(self, "allocate_shared", [f"{numel} elements of {dtype}, one copy per host"])
        return self._made_on_all_hosts(partial(self._inside.allocate_shared_agreed, numel, dtype))

    def team(self, device: torch.device) -> Team:
        if not self._has_teams(device):
            return super().team(device)
        return Team(self._hosts.members[0], self._members.index(self.rank))

    def _has_teams(self, device: torch.device) -> bool:
        """Return whether each host holds its own full copy of sharded state.

        Hosts with different numbers of ranks would cut the state at different places. Some optimizer kernels round the
        last elements of a tensor differently, so the hosts' copies would drift apart.
        """
        return device.type == "cpu" and self._hosts.are_alike

    def _made_on_all_hosts(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that `make` creates; raise on all ranks if one host lacks the memory."""
        made, trouble = None, ""
        try:
            made = make()
        except (SynclineError, OSError, MemoryError) as error:
            trouble = trouble_on_host(self._members, error)
        raise_if_any(self._beneath, trouble)
        assert made is not None
        return made

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        beneath = self._beneath.lane(purpose)
        assert isinstance(beneath, C10dTransport)
        lane = copy(self)
        lane.own_lane = beneath.own_lane
        if beneath is self._beneath:  # one connection for all lanes, used only by messages and other devices
            self._num_lanes_for[purpose] += 1
            lane.own_lane = Lane(lane_name(purpose, self._num_lanes_for[purpose]), None)
            self.health.lanes.append(lane.own_lane)
        lane._open(beneath, f"a lane for {purpose}")
        self._lanes.append(lane)
        return lane

    def split(self, color: int | None) -> Transport | None:
        part = self._beneath.split(color)
        if not isinstance(part, C10dTransport):
            return part
        try:
            return HierarchicalTransport.over(part, host=self._host)
        except SharedMemoryUnavailable:  # enough memory for the whole group, but not for this part as well
            return part

    def abort(self, reason: str) -> None:
        self.health.fail(Failure(PeerFailed, reason, aborted_by=self.rank))

    def leave(self) -> None:
        """Inform the peers that this rank leaves in good order: ranks that still wait for it raise `UnevenInputs`."""
        self.health.leave()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.clear()
        is_main = self.own_lane.name == MAIN_LANE
        if is_main:
            self.health.close()  # informs the peers before they lose the connection
        for lane in list(self._lanes) if is_main else []:
            lane.close()
        if self in self._lanes:
            self._lanes.remove(self)
        for part in (self._up, self._down, self._across, self._inside if is_main else None):
            if part is not None:
                part.close()
        if is_main or self._beneath.own_lane is self.own_lane:
            self._beneath.close()
        else:
            self.health.position.mark_lane_closed(self.own_lane)


# ---------------------------------------------------------------------- small steps


def _local(action: Callable[[], object]) -> Phase:
    """Return a phase that runs `action` on this rank, without communication."""

    def run() -> None:
        action()

    return Phase(None, run)


def _divide(tensor: Tensor, size: int) -> None:
    with writing():
        tensor.detach().div_(size)


def _fill(target: Tensor, values: Tensor) -> None:
    with writing():
        target.detach().view(-1).copy_(values)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
