"""The engine for several hosts, which uses shared memory within each host and Gloo between hosts.

The leader of a host is its lowest rank. An operation has up to three phases: data goes "up" to the leaders through
shared memory, "across" between the leaders through a process group of the leaders, and "down" to the other ranks
through shared memory. So each byte crosses the network once per host, not once per rank.

A large tensor is reduced in pieces. While one piece is on the network, the next ones go up and earlier ones go down.

The transport beneath connects all ranks. It handles messages between hosts and all tensors that are not on the CPU, and
provides notices, board and errors. Messages within a host go through shared memory.

All ranks get the same bits. Within a host, sums run in rank order. Between hosts, the backend determines the order.
fp16 and bf16 are summed in fp32 and rounded within a host, then summed and rounded again between hosts. To compute a
mean, the leaders divide the sum by the number of all ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.liveness.board import MAIN_LANE
from syncline.liveness.health import Lane
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Team, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.c10d_groups import divide, fill
from syncline.transport.hosts import Hosts, host_key_or_random, raise_if_any, shared_memory_inside
from syncline.transport.phases import Phase, PhasedWork, PhaseQueue
from syncline.transport.shared_memory.hub import Exchange, SharedMemoryUnavailable, attempt
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.transport.watched import WatchedTransport
from syncline.transport.work import Work

_TOKEN_BYTES = 8

_PIECES_FROM_BYTES = 8 * 2**20
"""The size from which a tensor is reduced in pieces."""

_NUM_PIECES = 8
"""The number of pieces. It does not depend on the tensor, so tensors of different lengths have different pieces."""

_ALIGNED_NUMEL = 1024
"""The number of elements of which each piece but the first is a multiple."""

_TITLE = "shared memory within hosts"

_Start = Callable[[Transport], Work]
"""A function that gets the transport of one phase ("across" or "down"), and starts the phase on it."""

_StartUp = Callable[[SharedMemoryTransport], Work]
"""A function that gets the transport of the phase "up", and starts the phase on it."""


class HierarchicalTransport(WatchedTransport):
    """A transport between the ranks of several hosts. All ranks create it together, by the static method `over`.

    Args:
        beneath: the transport between all ranks.
        hosts: the hosts and their ranks.
        inside: the transport between the ranks of this host. Pass None for a rank that is alone on its host.
        host: this rank's extra key, by which `over` distinguishes hosts. It is kept for `split`.
    """

    def __init__(
        self, beneath: C10dTransport, hosts: Hosts, inside: SharedMemoryTransport | None, host: str
    ) -> None:
        super().__init__(
            beneath.health,
            beneath.own_lane,
            rank=beneath.rank,
            size=beneath.size,
            timeout_seconds=beneath.timeout_seconds,
        )
        self._hosts = hosts
        self._host = host
        self._own_host = hosts.host_of[self.rank]
        self._members = hosts.members[self._own_host]
        self._inside = inside
        self._open(beneath, _TITLE)
        self.health.runs_over(self.name)

    def _open(self, beneath: C10dTransport, title: str) -> None:
        """Open the connections of one lane; a collective call.

        If a host lacks shared memory for the lane, all ranks raise `SharedMemoryUnavailable`.
        """
        leaders, name = self._hosts.leaders, self.own_lane.name
        if self.rank in leaders:
            beneath.prepare_groups()
        tokens = exchange(beneath, title, [], payload=secrets.token_bytes(_TOKEN_BYTES))
        self._beneath = beneath
        self._queue = PhaseQueue()
        self._up: SharedMemoryTransport | None = None
        self._down: SharedMemoryTransport | None = None
        self._across: C10dTransport | None = None
        _, trouble = attempt(self._open_inside)
        if self.rank in leaders:
            token = tokens[leaders[0]][:_TOKEN_BYTES]
            self._across, forget_addresses = beneath.lane_among(leaders, f"{name}, across hosts", token)
        # This collective call ends when all ranks have made it. If a rank closed the lane earlier, it would disconnect
        # leaders that are still connecting.
        raise_if_any(beneath, self._members, trouble)
        if self._across is not None:
            forget_addresses()

    def _open_inside(self) -> None:
        if self._inside is not None:
            self._up = self._inside.lane_agreed(f"{self.own_lane.name}, up")
            self._down = self._inside.lane_agreed(f"{self.own_lane.name}, down")

    @staticmethod
    def over(
        beneath: C10dTransport,
        *,
        host: str = "",
        gather: Exchange | None = None,
        keys: Sequence[str | None] = (),
    ) -> Transport:
        """Return the fastest transport for the ranks of `beneath`; a collective call.

        If all ranks are on one host, the result is a `SharedMemoryTransport`. With several hosts, the result is a
        `HierarchicalTransport`, but there are two exceptions: if every host has only one rank, or if `beneath` does not
        send CPU tensors over Gloo, the result is `beneath` itself. Closing the result closes `beneath` as well.

        Args:
            beneath: the transport between the ranks.
            host: an extra key of this rank. Ranks with different keys are treated as ranks on different hosts.
            gather: a function with which the ranks find each other. Pass None to use `beneath`.
            keys: the key of each rank's host, the same keys on all ranks. If one is missing, the ranks exchange keys.

        Raises:
            SharedMemoryUnavailable: ranks of one host cannot share memory. All ranks raise this error.
        """
        if beneath.size == 1:
            return beneath
        if not keys or None in keys:
            mine = f"{host_key_or_random()} {host}".encode()
            hosts = Hosts.of((gather or beneath.all_gather_bytes)(mine))
        else:
            hosts = Hosts.of(keys)
        if len(hosts.members) == 1:
            return SharedMemoryTransport.over(beneath, gather)
        if hosts.widest == 1 or beneath.backends.get("cpu") != "gloo":
            return beneath
        try:
            return HierarchicalTransport(beneath, hosts, shared_memory_inside(beneath, hosts), host)
        except SharedMemoryUnavailable:
            beneath.health.on_failure.clear()
            beneath.health.runs_over(beneath.name)
            raise

    @property
    def name(self) -> str:
        on_cpu = f"shared memory within {len(self._hosts.members)} hosts, gloo across"
        return ", ".join([on_cpu, *self._beneath.other_devices])

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
        pieces = self._reduction(whole, op)
        return self._start("reduce_scatter", op, input, pieces, at_end=partial(fill, output, mine))

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        if not tensor.is_cpu:
            return self._beneath._start_reduce_spans(tensor, bounds, op)
        return self._start("reduce_spans", op, tensor, self._reduction(tensor, op))

    def _reduction(self, tensor: Tensor, op: ReduceOp) -> list[list[Phase]]:
        """Return this rank's phases of the reduction of a tensor, for each of its pieces."""
        numel = tensor.numel()
        bounds = [0, numel] if tensor.nbytes < _PIECES_FROM_BYTES else _bounds(numel)
        return [self._reduction_of(tensor, from_, to, op) for from_, to in pairwise(bounds)]

    def _reduction_of(self, tensor: Tensor, from_: int, to: int, op: ReduceOp) -> list[Phase]:
        part: ReduceOp = "sum" if op == "mean" else op
        piece = tensor.detach().view(-1)[from_:to]
        return self._phases(
            lambda up: up.start_reduce(tensor, from_, to, part),
            lambda across: across._start_all_reduce(piece, part),
            lambda down: down._start_broadcast(piece, 0),
            after_across=partial(divide, piece, self.size) if op == "mean" else None,
        )

    # ------------------------------------------------------------------ data

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if not input.is_cpu:
            return self._beneath._start_all_gather(output, input)
        hosts, mine, everyone = self._hosts, _as_bytes(input), _as_bytes(output)
        of_host = torch.empty(hosts.widest * mine.numel(), dtype=torch.uint8, device="cpu")
        here = of_host[: len(self._members) * mine.numel()]
        if self._up is None:
            here.copy_(mine)
        whole, sort = everyone, None
        if self._across is not None and not hosts.is_even:
            whole = torch.empty(len(hosts.members) * of_host.numel(), dtype=torch.uint8, device="cpu")
            sort = partial(hosts.put_in_rank_order, everyone, whole)
        phases = self._phases(
            lambda up: up._start_all_gather(here, mine),
            lambda across: across._start_all_gather(whole, of_host),
            lambda down: down._start_broadcast(everyone, 0),
            after_across=sort,
        )
        return self._start("all_gather", "", input, [phases])

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
        return self._start("broadcast", f"from rank {src}", tensor, [phases])

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        self._check_usable()
        if tensor.is_cpu and self._up is not None and dst in self._members:
            return self._up._start_send(tensor, self._members.index(dst), terms)
        return self._beneath._start_send(tensor, dst, terms)

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        self._check_usable()
        if tensor.is_cpu and self._up is not None and src in self._members:
            return self._up._start_recv(tensor, self._members.index(src), terms)
        return self._beneath._start_recv(tensor, src, terms)

    def _start_barrier(self) -> Work:
        def start(part: Transport) -> Work:
            return part._start_barrier()

        return self._start("barrier", "", None, [self._phases(start, start, start)])

    def _phases(
        self,
        up: _StartUp | None,
        across: _Start,
        down: _Start | None,
        *,
        after_across: Callable[[], None] | None = None,
    ) -> list[Phase]:
        """Return this rank's phases of an operation.

        Args:
            up: the function that starts the phase in which the leader of the host gets data. Pass None for no such
                phase.
            across: the function that starts the phase between the leaders.
            down: the function that starts the phase in which the leader of the host sends data to its other ranks. Pass
                None for no such phase.
            after_across: a function that the leaders call after the phase between them. Pass None for no function.
        """
        phases = []
        if self._up is not None and up is not None:
            phases.append(Phase("up", partial(up, self._up)))
        if self._across is not None:
            phases.append(Phase("across", partial(across, self._across)))
            if after_across is not None:
                phases.append(Phase(None, after_across))
        if self._down is not None and down is not None:
            phases.append(Phase("down", partial(down, self._down)))
        return phases

    def _start(
        self,
        operation: str,
        detail: str,
        tensor: Tensor | None,
        pieces: list[list[Phase]],
        *,
        at_end: Callable[[], object] | None = None,
    ) -> Work:
        self._check_usable()
        self.own_lane.num_started += 1
        work = PhasedWork(self, operation, detail, tensor)
        self._queue.add(work, pieces, at_end)
        return work

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
            make = partial(self._inside.regions.allocate, numel, dtype, token)
        return self._made_on_all_hosts(make)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        if self._inside is None:
            return super().narrow(tensor, numel)
        return self._inside.regions.narrow(tensor, numel)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if not self._has_teams(device):
            return None
        assert self._inside is not None
        exchange(self, "allocate_shared", [f"{numel} elements of {dtype}, one copy per host"])
        return self._made_on_all_hosts(partial(self._inside.regions.allocate_shared, numel, dtype))

    def team(self, device: torch.device) -> Team:
        if not self._has_teams(device):
            return super().team(device)
        return Team(self._hosts.members[0], self._members.index(self.rank))

    def _has_teams(self, device: torch.device) -> bool:
        """Return whether sharded state on `device` is divided within each host, so that each host holds a full copy.

        This requires that all hosts have the same number of ranks. If the numbers differed, the hosts would cut the
        state at different offsets. Some optimizer kernels round the last elements of a tensor in another way than the
        elements before them, so the copies of the hosts would drift apart.
        """
        return device.type == "cpu" and self._hosts.are_alike

    def _made_on_all_hosts(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that `make` creates; a collective call.

        If one host lacks the memory, all ranks raise `SharedMemoryUnavailable`.
        """
        made, trouble = attempt(make)
        raise_if_any(self._beneath, self._members, trouble)
        assert made is not None
        return made

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        beneath = self._beneath.lane(purpose)
        assert isinstance(beneath, C10dTransport)
        own_lane = beneath.own_lane
        if beneath is self._beneath:  # one connection for all lanes, used only for messages and other devices
            own_lane = Lane(self.numbered(purpose), None)
            self.health.lanes.append(own_lane)
        lane = self._copy_for(own_lane)
        lane._open(beneath, f"a lane for {purpose}")
        return lane

    def split(self, color: int | None) -> Transport | None:
        part = self._beneath.split(color)
        if not isinstance(part, C10dTransport):
            return part
        try:
            return HierarchicalTransport.over(part, host=self._host)
        except (
            SharedMemoryUnavailable
        ):  # there is not enough memory for this part, besides that of the whole group
            return part

    def _release(self) -> None:
        self._queue.clear()
        is_main = self.own_lane.name == MAIN_LANE
        for part in (self._up, self._down, self._across, self._inside if is_main else None):
            if part is not None:
                part.close()
        if self._beneath.own_lane is self.own_lane:
            self._beneath.close()


def _bounds(numel: int) -> list[int]:
    """Return the bounds of the pieces of a tensor with so many elements.

    The first piece gets the rest, and is always larger than the others. So if hosts reduce tensors of different
    lengths, or several small tensors on one host and a large one on another, their first or second pieces differ, and
    Gloo does not add up pieces that do not belong together.

    Examples:
        >>> _bounds(8 * 3 * 1024)
        [0, 10240, 12288, 14336, 16384, 18432, 20480, 22528, 24576]
    """
    each = max(0, numel // _NUM_PIECES // _ALIGNED_NUMEL - 1) * _ALIGNED_NUMEL
    return [0, *(numel - left * each for left in range(_NUM_PIECES - 1, -1, -1))]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
