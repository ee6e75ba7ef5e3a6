"""Engine for the ranks of one host, over memory that all of them have mapped.

Tensors on the CPU go through the native core. Tensors on other devices go through the transport beneath (Gloo, NCCL),
over which the ranks first connected. That transport also provides notices, board and errors.

Reductions run in rank order 0 .. size - 1, so all ranks and all runs get the same bits; fp16 and bf16 are summed in
fp32 and rounded once.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from syncline.errors import PeerFailed
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure, lane_name
from syncline.liveness.health import CLOSED, Health, Lane
from syncline.liveness.notices import Notices, publisher
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.shared_memory.core import library
from syncline.transport.shared_memory.engine import (
    REDUCED_DTYPES,
    Engine,
    EngineLane,
    Kind,
    LaneSizes,
    code_of,
    reduction_codes,
)
from syncline.transport.shared_memory.hub import Hub, store_exchange
from syncline.transport.shared_memory.regions import IN_PLACE_BYTES, Regions
from syncline.transport.shared_memory.work import SharedMemoryWork
from syncline.transport.threads import ThreadGroup
from syncline.transport.work import DONE, Work

_CODES = {
    kind: reduction_codes(kind, REDUCED_DTYPES)
    for kind in (
        Kind.ALL_REDUCE,
        Kind.REDUCE_SCATTER,
        Kind.ALL_REDUCE_IN_PLACE,
        Kind.REDUCE_SCATTER_IN_PLACE,
    )
}


class SharedMemoryTransport(Transport):
    """This rank's side of a group on one host; created by `over` or `connect`, on all ranks together.

    Args:
        hub: the connections between the ranks.
        beneath: the transport over which the ranks connected. It takes tensors that are not on the CPU. None if there
            is none.
        store: the store over which the ranks connected, if there is no transport beneath.
        health: the health of the group.
        own_lane: the lane that counts the calls.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
        board: where this rank is.
        numbers: the ranks' numbers in the larger group to which `health` belongs, which error messages use; None if
            it belongs to this group.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        beneath: C10dTransport | None,
        store: Any,
        health: Health,
        own_lane: Lane,
        timeout_seconds: float,
        board: Board,
        numbers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank=hub.rank, size=hub.size, timeout_seconds=timeout_seconds, board=board)
        self.health = health
        self.own_lane = own_lane
        self.peers = hub.peers
        self._numbers = range(hub.size) if numbers is None else numbers
        self._hub = hub
        self._beneath = beneath
        self._store = store
        self._lanes: list[SharedMemoryTransport] = []
        self._num_lanes_for: Counter[str] = Counter()
        self._num_splits = 0
        self._regions = Regions(hub)
        self._region_of = self._regions.of  # looked up in each reduction
        self.engine = Engine(
            hub.allocate(Engine.num_bytes(self.size), "the group"), rank=self.rank, size=self.size
        )
        self._open(hub)
        health.runs_over(self.name)
        engine, rank = self.engine, health.rank  # the health must not hold on to its transport
        self._abort_core = lambda failure: engine.abort(failure.to_json(rank))
        health.on_failure.append(self._abort_core)

    def _open(self, hub: Hub) -> None:
        is_main = self.own_lane.name == MAIN_LANE
        sizes = LaneSizes(self.size, has_messages=is_main)
        memory = hub.allocate(sizes.total_bytes, f"the {self.own_lane.name} lane")
        self.engine_lane = EngineLane(self.engine, memory, sizes)
        self._handle = self.engine_lane.handle
        self._start_native, self._start_in_place = library().start, library().start_in_place

    @staticmethod
    def over(beneath: C10dTransport) -> Transport:
        """Return a transport between the ranks of `beneath`, which it closes together with itself; a collective call.

        Raises:
            SharedMemoryUnavailable: the ranks cannot share memory, because they are on several hosts, for instance.
                Raised on all ranks.
        """
        if beneath.size == 1:
            return beneath
        hub = Hub(rank=beneath.rank, size=beneath.size, exchange=beneath.all_gather_bytes)
        beneath.own_lane.num_started = 0  # call numbers in messages start here
        return SharedMemoryTransport(
            hub,
            beneath=beneath,
            store=None,
            health=beneath.health,
            own_lane=beneath.own_lane,
            timeout_seconds=beneath.timeout_seconds,
            board=beneath.board,
        )

    @staticmethod
    def connect(
        store: Any, *, rank: int, size: int, timeout_seconds: float, board: Board | None = None
    ) -> Transport:
        """Connect ranks through a torch.distributed store, without a transport beneath; a collective call.

        Args:
            store: the same for all ranks; see `store_exchange`.
            rank: this rank.
            size: number of ranks.
            timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`.
            board: where this rank is; None for a new board.

        Raises:
            SharedMemoryUnavailable: the ranks cannot share memory, because they are on several hosts, for instance.
                Raised on all ranks.
        """
        board = Board() if board is None else board
        if size == 1:
            alone = ThreadGroup(1, timeout_seconds).transport(0)
            alone.board = board
            return alone
        hub = Hub(rank=rank, size=size, exchange=store_exchange(store, rank, size, timeout_seconds))
        notices = Notices(store, rank=rank, size=size)
        own_lane = Lane(MAIN_LANE, None)
        health = Health(
            own_lane,
            board,
            notices,
            rank=rank,
            size=size,
            backend="shared memory",
            timeout_seconds=timeout_seconds,
        )
        transport = SharedMemoryTransport(
            hub,
            beneath=None,
            store=store,
            health=health,
            own_lane=own_lane,
            timeout_seconds=timeout_seconds,
            board=board,
        )
        publisher().add(health)
        return transport

    @property
    def name(self) -> str:
        if self._beneath is None or not self._beneath.other_devices:
            return "shared memory"
        others = ", ".join(
            f"{name} ({device})" for device, name in sorted(self._beneath.other_devices.items())
        )
        return f"shared memory (cpu), {others}"

    @property
    def group(self) -> Any:
        """The process group beneath; None if there is none, or once it is closed."""
        return None if self._beneath is None else self._beneath.group

    # ------------------------------------------------------------------ operations

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_all_reduce(tensor, op)
        numel = _core_numel(tensor)
        if self._region_of and not terms and (region := self._region_of.get(id(tensor))) is not None:
            code = _CODES[Kind.ALL_REDUCE_IN_PLACE][tensor.dtype, op]
            arguments = (code, *region, numel, 0, 0, 0)
            return self._begin("all_reduce", op, (tensor,), self._start_in_place, *arguments)
        code, pointer = _CODES[Kind.ALL_REDUCE][tensor.dtype, op], tensor.data_ptr()
        return self._begin(
            "all_reduce", op, (tensor,), self._start_native, code, pointer, pointer, numel, terms
        )

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if not input.is_cpu:
            return self._transport_beneath(input)._start_reduce_scatter(output, input, op)
        numel, tensors, target = _core_numel(output), (input, output), output.data_ptr()
        if self._region_of and (region := self._region_of.get(id(input))) is not None:
            code = _CODES[Kind.REDUCE_SCATTER_IN_PLACE][input.dtype, op]
            from_ = self.rank * numel
            arguments = (code, *region, self.size * numel, target, from_, from_ + numel)
            return self._begin("reduce_scatter", op, tensors, self._start_in_place, *arguments)
        code = _CODES[Kind.REDUCE_SCATTER][input.dtype, op]
        return self._begin(
            "reduce_scatter", op, tensors, self._start_native, code, input.data_ptr(), target, numel, 0
        )

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        region = self._region_of.get(id(tensor))
        if region is None:
            return super()._start_reduce_spans(tensor, bounds, op)
        code = _CODES[Kind.REDUCE_SCATTER_IN_PLACE][tensor.dtype, op]
        width = 2 if tensor.dtype.is_complex else 1
        from_, to = bounds[self.rank], bounds[self.rank + 1]
        target = tensor.data_ptr() + from_ * tensor.element_size()
        arguments = (code, *region, _core_numel(tensor), target, from_ * width, to * width)
        return self._begin("reduce_spans", op, (tensor,), self._start_in_place, *arguments)

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if not input.is_cpu:
            return self._transport_beneath(input)._start_all_gather(output, input)
        arguments = (
            code_of(Kind.ALL_GATHER, input.dtype),
            input.data_ptr(),
            output.data_ptr(),
            input.numel(),
            terms,
        )
        return self._begin("all_gather", "", (input, output), self._start_native, *arguments)

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_broadcast(tensor, src)
        code, pointer = code_of(Kind.BROADCAST, tensor.dtype, peer=src), tensor.data_ptr()
        detail = f"from rank {self._numbers[src]}"
        arguments = (code, pointer, pointer, tensor.numel(), 0)
        return self._begin("broadcast", detail, (tensor,), self._start_native, *arguments)

    def _start_send(self, tensor: Tensor, dst: int) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_send(tensor, dst)
        arguments = (code_of(Kind.SEND, tensor.dtype, peer=dst), tensor.data_ptr(), 0, tensor.numel(), 0)
        queue, detail = self.engine_lane.queue_of_sends(dst), f"to rank {self._numbers[dst]}"
        return self._begin("send", detail, (tensor,), self._start_native, *arguments, queue=queue, peer=dst)

    def _start_recv(self, tensor: Tensor, src: int) -> Work:
        if not tensor.is_cpu:
            return self._transport_beneath(tensor)._start_recv(tensor, src)
        arguments = (code_of(Kind.RECV, tensor.dtype, peer=src), 0, tensor.data_ptr(), tensor.numel(), 0)
        queue, detail = self.engine_lane.queue_of_receives(src), f"from rank {self._numbers[src]}"
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
        """Start an operation by the core's function `start`, with the lane and `arguments`."""
        health = self.health
        if health.failure is not None:
            raise health.error()
        if get_ident() != health.calling_thread:
            health.called_from(get_ident())
        if self._handle is None or health.has_lost_its_group():
            raise CLOSED.on_rank(health.rank)
        if not queue:
            self.own_lane.num_started += 1
        ticket = start(self._handle, *arguments)
        if ticket < 0:
            return DONE
        return self._under_way(operation, detail, tensors, queue, ticket, peer)

    def _under_way(
        self,
        operation: str,
        detail: str,
        tensors: Sequence[Tensor],
        queue: int,
        ticket: int,
        peer: int | None,
    ) -> Work:
        if ticket == 0:
            raise MemoryError(f"{operation}: no memory left to record the operation")
        self.engine_lane.keep(queue, ticket, tensors)
        tensor = tensors[0] if tensors else None
        work = SharedMemoryWork(self, operation, detail, tensor)
        work.enter(self.engine_lane, self.peers, self._numbers, queue, ticket, peer)
        return work

    def _transport_beneath(self, tensor: Tensor) -> C10dTransport:
        if self._beneath is None:
            raise ValueError(
                f"expected a tensor on the CPU, got one on {tensor.device}: shared memory is for CPU tensors. Use a "
                "process group that also has a backend for this device"
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
        token, *_ = exchange(
            self, "allocate", [f"{numel} elements of {dtype}"], payload=secrets.token_bytes(8)
        )
        return self.allocate_agreed(numel, dtype, token)

    def allocate_agreed(self, numel: int, dtype: torch.dtype, token: bytes) -> Tensor:
        """Allocate memory like `allocate`, for ranks that have agreed already; see `Regions.allocate`."""
        return self._regions.allocate(numel, dtype, token)

    def narrow(self, tensor: Tensor, numel: int) -> Tensor:
        return self._regions.narrow(tensor, numel)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if device.type != "cpu":
            return None
        exchange(self, "allocate_shared", [f"{numel} elements of {dtype}"])
        return self.allocate_shared_agreed(numel, dtype)

    def allocate_shared_agreed(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate shared memory like `allocate_shared`, for ranks that have agreed already."""
        return self._regions.allocate_shared(numel, dtype)

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        exchange(self, f"a lane for {purpose}", [])
        self._num_lanes_for[purpose] += 1
        lane = self.lane_agreed(lane_name(purpose, self._num_lanes_for[purpose]))
        self.health.lanes.append(lane.own_lane)
        return lane

    def lane_agreed(self, name: str) -> SharedMemoryTransport:
        """Return a new lane for ranks that have agreed already. The lane is not added to the lanes of `health`."""
        lane = copy(self)
        lane.own_lane = Lane(name, None)
        lane._open(self._hub)
        self._lanes.append(lane)
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

    def abort(self, reason: str) -> None:
        self.health.fail(Failure(PeerFailed, reason, aborted_by=self.rank))

    def leave(self) -> None:
        """Inform the peers that this rank leaves in good order: ranks that still wait for it raise `UnevenInputs`."""
        self.health.leave()

    def close(self) -> None:
        self._handle = None
        if self.own_lane.name != MAIN_LANE:
            self.health.position.mark_lane_closed(self.own_lane)
            if self in self._lanes:  # the list would keep the lane's memory mapped
                self._lanes.remove(self)
            return
        for lane in self._lanes:
            lane._handle = None
        if self._beneath is not None:
            self._beneath.close()
        else:
            self.health.close()
        if self._abort_core in self.health.on_failure:
            self.health.on_failure.remove(self._abort_core)
        self._hub.close()


def _core_numel(tensor: Tensor) -> int:
    """Return the number of elements as the core counts them: a complex number is a pair."""
    return tensor.numel() * (2 if tensor.dtype.is_complex else 1)
