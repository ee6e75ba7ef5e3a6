"""A transport that sends tensors through shared memory, between ranks on one host.

The native core handles CPU tensors. The ranks can connect over another transport (Gloo, NCCL), which is then called the
transport beneath. It handles the tensors on other devices, and provides notices, board and errors.

Each reduction combines the ranks in the order 0 .. size - 1, so all ranks and all runs get the same bits. fp16 and bf16
are summed in fp32 and rounded once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from syncline.errors import SynclineError
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Call, Failure
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import Health, Lane
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.shared_memory.engine import (
    IN_PLACE_BYTES,
    Engine,
    EngineLane,
    Kind,
    LaneSizes,
    Outcome,
    Regions,
    call_of,
    code_of,
    core_numel,
    reduction_codes,
)
from syncline.transport.shared_memory.hub import Exchange, Hub, library, pages, store_exchange
from syncline.transport.shared_memory.medium import MemoryMedium
from syncline.transport.shared_memory.memory import SharedMemory
from syncline.transport.threads import transport_of_one_rank
from syncline.transport.watched import WatchedTransport, WatchedWork
from syncline.transport.work import DONE, Disagreement, Work

_ALL_REDUCE = reduction_codes(Kind.ALL_REDUCE)

_ALL_REDUCE_IN_PLACE = reduction_codes(Kind.IN_PLACE_ALL_REDUCE)

_REDUCE_SCATTER = reduction_codes(Kind.REDUCE_SCATTER)

_REDUCE_SCATTER_IN_PLACE = reduction_codes(Kind.IN_PLACE_REDUCE_SCATTER)

_REDUCE = reduction_codes(Kind.REDUCE)

_REDUCE_IN_PLACE = reduction_codes(Kind.IN_PLACE_REDUCE)


class SharedMemoryTransport(WatchedTransport):
    """A transport between the ranks of one host. All ranks create it together, by `over` or by `connect`.

    Args:
        hub: the connections between the ranks.
        health: the object that records failures of the group.
        own_lane: the name of the first lane, and the counter of its calls.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
        beneath: the transport over which the ranks connected. It handles the tensors that are not on the CPU. Pass None
            if the ranks connected over a store.
        store: the store over which the ranks connected. Pass None if there is a transport beneath.
        numbers: for each rank, its number in the larger group to which `health` belongs. Errors name the ranks by these
            numbers. Pass None if `health` belongs to this group.
    """

    def __init__(
        self,
        hub: Hub,
        health: Health,
        own_lane: Lane,
        *,
        timeout_seconds: float,
        beneath: C10dTransport | None = None,
        store: Any = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(health, own_lane, rank=hub.rank, size=hub.size, timeout_seconds=timeout_seconds)
        self.peers = hub.peers
        self.regions = Regions(hub)
        self._region_of = self.regions.of  # each reduction looks its tensor up here
        self.numbers = range(hub.size) if numbers is None else numbers
        """For each rank, the number by which errors name it."""
        self._hub = hub
        self._beneath = beneath
        self._store = store
        self._num_splits = 0
        notices_at = Engine.num_bytes(self.size)
        lane_at = pages(notices_at + MemoryMedium.num_bytes(self.size))
        sizes = LaneSizes(
            self.size
        )  # of the first lane, which is in the same memory: each allocation is collective
        memory = hub.allocate(
            lane_at + sizes.total_bytes, "the group", populated_bytes=lane_at + sizes.populated_bytes
        )
        self.engine = Engine(memory, rank=self.rank, size=self.size)
        self._open(memory, sizes, lane_at)
        health.runs_over(self.name)
        engine, rank = self.engine, health.rank  # the health must not refer to its transport
        self._abort_core = lambda failure: engine.abort(failure.to_json(rank))
        health.on_failure.append(self._abort_core)
        if numbers is None:
            health.exchange_notices(MemoryMedium(engine, notices_at), hub.peers.processes)

    def _open(self, memory: SharedMemory, sizes: LaneSizes, begin: int = 0) -> None:
        """Open this lane in shared memory, from the byte `begin` on."""
        self.engine_lane = EngineLane(self.engine, memory, sizes, begin)
        self._handle = self.engine_lane.handle
        self._start_native, self._start_in_place = library().start, library().start_in_place
        self._start_part = library().start_part

    @staticmethod
    def over(beneath: C10dTransport, gather: Exchange | None = None) -> Transport:
        """Return a shared-memory transport between the ranks of `beneath`; a collective call.

        Closing the result closes `beneath` as well. If there is only one rank, the result is `beneath` itself.

        Args:
            beneath: the transport between the ranks.
            gather: a function with which the ranks find each other. Pass None to use `beneath`.

        Raises:
            SharedMemoryUnavailable: the ranks cannot share memory, for instance because they are on several hosts. All
                ranks raise this error.
        """
        if beneath.size == 1:
            return beneath
        hub = Hub(
            rank=beneath.rank,
            size=beneath.size,
            exchange=gather or beneath.all_gather_bytes,
            timeout_seconds=beneath.timeout_seconds,
        )
        beneath.own_lane.num_started = 0  # errors number the calls from here on
        seconds = beneath.timeout_seconds
        return SharedMemoryTransport(
            hub, beneath.health, beneath.own_lane, timeout_seconds=seconds, beneath=beneath
        )

    @staticmethod
    def connect(
        store: Any, *, rank: int, size: int, timeout_seconds: float, board: Board | None = None
    ) -> Transport:
        """Connect the ranks through a torch.distributed store, and return the transport; a collective call.

        There is no transport beneath, so the result handles CPU tensors only.

        Args:
            store: a store that all ranks can reach; see `store_exchange`.
            rank: this rank.
            size: number of ranks.
            timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
            board: the object that records where in the program this rank is. Pass None to create a new board.

        Raises:
            SharedMemoryUnavailable: the ranks cannot share memory, for instance because they are on several hosts. All
                ranks raise this error.
        """
        board = Board() if board is None else board
        if size == 1:
            return transport_of_one_rank(timeout_seconds, board)
        hub = Hub(
            rank=rank,
            size=size,
            exchange=store_exchange(store, rank, size, timeout_seconds),
            timeout_seconds=timeout_seconds,
        )
        own_lane = Lane(MAIN_LANE, None)
        health = Health(
            own_lane,
            board,
            rank=rank,
            size=size,
            backend="shared memory",
            timeout_seconds=timeout_seconds,
        )
        return SharedMemoryTransport(hub, health, own_lane, timeout_seconds=timeout_seconds, store=store)

    @property
    def name(self) -> str:
        others = [] if self._beneath is None else self._beneath.other_devices
        return ", ".join(["shared memory (cpu)", *others]) if others else "shared memory"

    @property
    def group(self) -> Any:
        """The process group of the transport beneath.

        The value is None if there is no transport beneath, or once the transport is closed.
        """
        return None if self._beneath is None else self._beneath.group

    # ------------------------------------------------------------------ operations

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_all_reduce(tensor, op)
        dtype = tensor.dtype
        numel = tensor.numel() * (2 if dtype.is_complex else 1)  # `core_numel`, inlined in the hot path
        if self._region_of and not terms and (region := self._region_of.get(id(tensor))) is not None:
            arguments = (_ALL_REDUCE_IN_PLACE[dtype, op], *region, numel, 0, 0, 0)
            return self._begin("all_reduce", op, (tensor,), self._start_in_place, *arguments)
        code, address = _ALL_REDUCE[dtype, op], tensor.data_ptr()
        return self._begin(
            "all_reduce", op, (tensor,), self._start_native, code, address, address, numel, terms
        )

    def start_reduce(self, tensor: Tensor, from_: int, to: int, op: ReduceOp) -> Work:
        """Reduce the elements from `from_` up to `to` of a tensor on the CPU to rank 0; the other ranks keep theirs.

        The ranks compare the number of elements of the whole tensor.
        """
        numel, width = core_numel(tensor), 2 if tensor.dtype.is_complex else 1
        part = (from_ * width, to * width)
        region = self._region_of.get(id(tensor))
        if region is None:
            code, start = _REDUCE[tensor.dtype, op], self._start_part
            return self._begin("all_reduce", op, (tensor,), start, code, tensor.data_ptr(), numel, *part)
        code, start = _REDUCE_IN_PLACE[tensor.dtype, op], self._start_in_place
        return self._begin("all_reduce", op, (tensor,), start, code, *region, numel, 0, *part)

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if not input.is_cpu:
            return self._transport_beneath(input)._start_reduce_scatter(output, input, op)
        numel, target = core_numel(output), output.data_ptr()
        if self._region_of and (region := self._region_of.get(id(input))) is not None:
            start, code = self._start_in_place, _REDUCE_SCATTER_IN_PLACE[input.dtype, op]
            from_ = self.rank * numel
            arguments: tuple[int, ...] = (code, *region, self.size * numel, target, from_, from_ + numel)
        else:
            start, code = self._start_native, _REDUCE_SCATTER[input.dtype, op]
            arguments = (code, input.data_ptr(), target, numel, 0)
        return self._begin("reduce_scatter", op, (input, output), start, *arguments)

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        region = self._region_of.get(id(tensor))
        if region is None:
            return super()._start_reduce_spans(tensor, bounds, op)
        code, numel = _REDUCE_SCATTER_IN_PLACE[tensor.dtype, op], core_numel(tensor)
        from_, to = bounds[self.rank], bounds[self.rank + 1]
        target = tensor.data_ptr() + from_ * tensor.element_size()
        width = 2 if tensor.dtype.is_complex else 1
        arguments = (code, *region, numel, target, from_ * width, to * width)
        return self._begin("reduce_spans", op, (tensor,), self._start_in_place, *arguments)

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if not input.is_cpu:
            return self._transport_beneath(input)._start_all_gather(output, input)
        code = code_of(Kind.ALL_GATHER, input.dtype)
        arguments = (code, input.data_ptr(), output.data_ptr(), input.numel(), terms)
        return self._begin("all_gather", "", (input, output), self._start_native, *arguments)

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_broadcast(tensor, src)
        code, address = code_of(Kind.BROADCAST, tensor.dtype, peer=src), tensor.data_ptr()
        arguments = (code, address, address, tensor.numel(), 0)
        detail = f"from rank {self.numbers[src]}"
        return self._begin("broadcast", detail, (tensor,), self._start_native, *arguments)

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_send(tensor, dst, terms)
        code = code_of(Kind.SEND, tensor.dtype, peer=dst, terms=terms)
        arguments = (code, tensor.data_ptr(), 0, tensor.numel(), 0)
        queue, detail = self.engine_lane.queue_of_sends(dst), f"to rank {self.numbers[dst]}"
        return self._begin("send", detail, (tensor,), self._start_native, *arguments, queue=queue, peer=dst)

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_recv(tensor, src, terms)
        code = code_of(Kind.RECV, tensor.dtype, peer=src, terms=terms)
        arguments = (code, 0, tensor.data_ptr(), tensor.numel(), 0)
        queue, detail = self.engine_lane.queue_of_receives(src), f"from rank {self.numbers[src]}"
        return self._begin("recv", detail, (tensor,), self._start_native, *arguments, queue=queue, peer=src)

    def _start_barrier(self) -> Work:
        return self._begin("barrier", "", (), self._start_native, Kind.BARRIER, 0, 0, 0, 0)

    def _begin(
        self,
        operation: str,
        detail: str,
        tensors: Sequence[Tensor],
        start: Callable[..., int],
        *arguments: int,
        queue: int = 0,
        peer: int | None = None,
    ) -> Work:
        """Start an operation of the native core, and return its work.

        Args:
            operation: the name of the operation, for messages.
            detail: the reduce operation or the peer, for messages. It is "" if the operation has neither.
            tensors: the tensors that the core uses. They are kept alive until the operation is done.
            start: the function of the core that starts the operation.
            arguments: the arguments of `start` after the handle of the lane.
            queue: the number by which the core knows the queue of the call. It is 0 for collectives.
            peer: the other rank of a message, or None for a collective.
        """
        self._check_usable()
        if not queue:
            self.own_lane.num_started += 1
        ticket = start(self._handle, *arguments)
        if ticket < 0:
            return DONE
        if ticket == 0:
            raise MemoryError(
                f"rank {self.rank} cannot start {operation}, because this process has no memory left to record it"
            )
        self.engine_lane.keep(queue, ticket, tensors)
        work = SharedMemoryWork(self, operation, detail, tensors[0] if tensors else None)
        work.enter(self, queue, ticket, peer)
        return work

    def _transport_beneath(self, tensor: Tensor) -> C10dTransport:
        if self._beneath is None:
            raise ValueError(
                f"expected a tensor on the CPU; got a tensor on {tensor.device}. This transport uses shared memory, "
                "which is for CPU tensors only. Create it over a process group that has a backend for this device"
            )
        return self._beneath

    # ------------------------------------------------------------------ memory

    @property
    def sees_calls(self) -> bool:
        return True

    def rounds_once(self, device: torch.device) -> bool:
        return device.type == "cpu"

    @property
    def reduces_in_place(self) -> bool:
        return True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or numel * dtype.itemsize < IN_PLACE_BYTES:
            return super().allocate(numel, dtype, device)
        lines = [f"{numel} elements of {dtype}"]
        token, *_ = exchange(self, "allocate", lines, payload=secrets.token_bytes(8))
        return self.regions.allocate(numel, dtype, token)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        return self.regions.narrow(tensor, numel)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if device.type != "cpu":
            return None
        exchange(self, "allocate_shared", [f"{numel} elements of {dtype}"])
        return self.regions.allocate_shared(numel, dtype)

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        exchange(self, f"a lane for {purpose}", [])
        lane = self.lane_agreed(self.numbered(purpose))
        self.health.lanes.append(lane.own_lane)
        return lane

    def lane_agreed(self, name: str) -> SharedMemoryTransport:
        """Return a new lane, without a check that all ranks make this call; a collective call.

        The caller has made this check already. The lane is not added to `health.lanes`.
        """
        lane = self._copy_for(Lane(name, None))
        sizes = LaneSizes(self.size, has_messages=False)
        memory = self._hub.allocate(
            sizes.total_bytes, f"the {name} lane", populated_bytes=sizes.populated_bytes
        )
        lane._open(memory, sizes)
        return lane

    def split(self, color: int | None) -> Transport | None:
        if self._beneath is not None:
            beneath = self._beneath.split(color)
            if not isinstance(beneath, C10dTransport):
                return beneath
            return SharedMemoryTransport.over(beneath)
        mine = b"" if color is None else str(color).encode()
        colors = [row.rstrip(b"\0") for row in exchange(self, "split", [], payload=mine)]
        self._num_splits += 1
        if color is None:
            return None
        members = [rank for rank in range(self.size) if colors[rank] == mine]
        return SharedMemoryTransport.connect(
            PrefixStore(f"split {self._num_splits} of {members}", self._store),
            rank=members.index(self.rank),
            size=len(members),
            timeout_seconds=self.timeout_seconds,
            board=self.board,
        )

    def _release(self) -> None:
        if self.own_lane.name != MAIN_LANE:
            return
        if self._beneath is not None:
            self._beneath.close()
        if self._abort_core in self.health.on_failure:
            self.health.on_failure.remove(self._abort_core)
        self._hub.close()


# ---------------------------------------------------------------------- works


_POLLS_PER_CHECK = 1000
"""The number of calls of `is_completed` after which a work checks whether the processes of the peers still exist."""

_PAUSE_IN_LONG_WAITS_SECONDS = 0.02
"""The time between two looks at the processes of the peers, if an operation has been under way for long.

It is shorter than the time after which connections of an ended process close (see `c10d_work.py`), so that a rank of
its host, which can name it, is still the first to report it.
"""

_PART_OF_WAIT = 1 / 8
"""The longest time between two looks, as a part of the time for which the operation has been under way."""


class SharedMemoryWork(WatchedWork):
    """The work of an operation in shared memory that was not complete when its call returned."""

    __slots__ = (
        "_engine_lane",
        "_num_polls",
        "_numbers",
        "_peer",
        "_peers",
        "_queue",
        "_ticket",
    )

    def enter(self, transport: SharedMemoryTransport, queue: int, ticket: int, peer: int | None) -> None:
        """Set the operation of the native core that this work represents.

        Args:
            transport: the lane on which the operation was started.
            queue: the number by which the core knows the queue of the operation.
            ticket: the number by which the core knows the operation.
            peer: the other rank of a message. Pass None for a collective.
        """
        self._engine_lane = transport.engine_lane
        self._peers = transport.peers
        self._numbers = transport.numbers
        self._queue = queue
        self._ticket = ticket  # 0 once the operation is done
        self._peer = peer
        self._num_polls = 0

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._ticket:
            self._wait_in_slices(self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def is_completed(self) -> bool:
        if not self._ticket:
            return True
        outcome = library().poll(self._engine_lane.handle, self._queue, self._ticket)
        if outcome == Outcome.DONE:
            self._end()
        elif outcome == Outcome.PENDING:  # callers that only poll must detect a lost peer as well
            self._num_polls = (self._num_polls + 1) % _POLLS_PER_CHECK
            return self._num_polls == 0 and bool(self._peers.gone())
        return True

    def _end(self) -> None:
        self._engine_lane.under_way.pop((self._queue, self._ticket), None)
        self._ticket = 0

    def _ends_within(self, seconds: float) -> bool:
        wait, handle, queue, ticket = library().wait, self._engine_lane.handle, self._queue, self._ticket
        patience = min(self.elapsed_seconds() * _PART_OF_WAIT, _PAUSE_IN_LONG_WAITS_SECONDS)
        pause = max(self._peers.pause_seconds, patience)
        while seconds > 0:
            outcome = wait(handle, queue, ticket, int(min(seconds, pause) * 1e9))
            if outcome != Outcome.PENDING:
                return self._ended(outcome)
            is_broken = self._health.failure is not None
            gone = () if is_broken else self._peers.gone()
            if is_broken or gone:
                if self._has_succeeded():  # the peer completed this operation before it ended
                    return True
                raise self._health.error() if is_broken else self._lost(gone)
            seconds -= pause
        return False

    def _has_succeeded(self) -> bool:
        if library().wait(self._engine_lane.handle, self._queue, self._ticket, 0) == Outcome.DONE:
            self._end()
        return not self._ticket

    def _lost(self, gone: Sequence[int]) -> SynclineError:
        outcome = library().poll(self._engine_lane.handle, self._queue, self._ticket)
        if outcome in (Outcome.ABORTED, Outcome.MISMATCH):  # another rank has reported the cause already
            return self._ended_by(outcome)
        return FailedWait(self._health, self).lost([self._numbers[rank] for rank in gone])

    def _ended(self, outcome: int) -> bool:
        if outcome not in (Outcome.DONE, Outcome.DISAGREED):
            raise self._ended_by(outcome)
        self._end()
        if outcome == Outcome.DISAGREED:
            raise Disagreement(
                f"{self}: the ranks made different calls, or named different roots. Make the same call on all ranks"
            )
        return True

    def _ended_by(self, outcome: int) -> SynclineError:
        health = self._health
        if health.failure is not None:
            return health.error()
        if outcome == Outcome.ABORTED:
            return health.adopted(Failure.from_json(self._engine_lane.engine.abort_text() or ""))
        return FailedWait(health, self).mismatched(self._calls())

    def _calls(self) -> dict[int, Call]:
        """Return the calls of the ranks at the place where they do not match.

        The result maps the number of each rank (for a message: only of this rank and its peer) to the rank's call.
        """
        called, peer = self._engine_lane.called(), self._peer
        engine = self._engine_lane.engine
        ranks = range(engine.size) if peer is None else (engine.rank, peer)
        numbers = [self._numbers[rank] for rank in ranks]
        others = [None] * engine.size if peer is None else numbers[::-1]
        return {
            number: call_of(code, numel, size=engine.size, peer=other)
            for number, (code, numel), other in zip(numbers, called, others, strict=True)
        }
