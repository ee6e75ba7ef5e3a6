"""The engine over any torch.distributed process group (Gloo, NCCL, MPI, UCC, or one backend per device type).

This engine calls the methods of the process group directly, because it is on the hot path of the training step:
`torch.distributed.all_reduce` and similar functions add 3 to 50 us of checks per call, depending on the version of
torch. This file and `c10d_groups.py` hide the differences between backends. MPI, for instance, cannot compute a mean.

Gloo does not detect that ranks make different calls. If the sizes differ, Gloo ends the *process* ("terminate called
... EnforceNotMet"), and the peers raise `PeerLost`. So callers must compare sizes between ranks first.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import (
    Gather,
    PrefixStore,
    all_gather_flat,
    reduce_scatter_flat,
    timeout_seconds_of,
)
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure
from syncline.liveness.connection import StoreConnection, clone_of
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.gathering import StoreGathering
from syncline.liveness.health import Health, Lane
from syncline.liveness.notices import StoreMedium
from syncline.liveness.processes import FORKED, RankProcess, is_inherited
from syncline.liveness.store import SignedStore
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.c10d_groups import (
    CallOptions,
    backends_of,
    destroy,
    divide,
    fill,
    host_copy,
    movable,
    name_of_new_group,
    new_group,
    put_back,
    reducible,
    through_host,
)
from syncline.transport.c10d_work import C10dWork, MessageWork
from syncline.transport.threads import transport_of_one_rank
from syncline.transport.watched import MESSAGES, WatchedTransport
from syncline.transport.work import DONE, Work
from syncline.words import describe_ranks, end_of_processes

_BACKENDS_WITH_MEAN = {"gloo", "nccl", "xccl"}

_FALLBACK_TIMEOUT_SECONDS = 1800.0
"""The timeout that is assumed for a process group whose backend does not report its timeout."""

_CONNECT_SECONDS = 30.0

_SPLIT = struct.Struct("<?q8s")
"""The layout of a rank's record for a split: whether it has a color, its color, and 8 random bytes for a group name."""


class C10dTransport(WatchedTransport):
    """A transport over a torch.distributed process group.

    Args:
        group: the process group. Pass None for the default group.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`. Pass None for the group's own
            timeout.
        board: the object that records where in the program this rank is. Pass the board of the larger transport if the
            new transport is a part of it. Pass None to create a new board.
        connection: a connection to a store, for keys of this group only, by which the ranks exchange notices. Groups
            of some ranks then need no connection of their own, either. Pass None to open one to the group's store, and
            another one before the first such group.
        processes: the process of each rank, None for an unknown one. It is empty if the ranks have to exchange them.
        exchanges_notices: whether the ranks exchange notices from now on. If it is False, either another transport over
            this one lets them do so, or the caller calls `exchange_notices`.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not a member of the group.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> transport = C10dTransport()
        >>> transport.name, transport.rank, transport.size
        ('gloo', 0, 1)
        >>> transport.all_reduce(torch.ones(2), "mean").wait()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_seconds: float | None = None,
        board: Board | None = None,
        connection: StoreConnection | None = None,
        processes: Sequence[RankProcess | None] = (),
        exchanges_notices: bool = True,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group "
                "or syncline.init first"
            )
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0 or not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"expected a process group of which this process is a member; got {group!r}")
        size = group.size()
        if size > 1 and is_inherited(group):
            raise FORKED.on_rank(rank)
        group_seconds = timeout_seconds_of(group) or _FALLBACK_TIMEOUT_SECONDS
        timeout_seconds = group_seconds if timeout_seconds is None else timeout_seconds
        self._group: Any = group  # None after `close`; Any, because no operation starts after that
        self._owns_group = False
        self._messages: Any = None if connection is None else group.get_group_store()
        """The store at which some ranks exchange the addresses of a new group. None before the first such group."""
        self.backends = backends_of(group)
        """The backend of each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
        self._has_mean = set(self.backends.values()) <= _BACKENDS_WITH_MEAN
        self._options = CallOptions(size, timeout_seconds, self.control_device, has_mean=self._has_mean)
        own_lane = Lane(MAIN_LANE, group, barrier_device=self.control_device.type)
        health = Health(
            own_lane,
            Board() if board is None else board,
            rank=rank,
            size=size,
            backend=self.name,
            timeout_seconds=max(timeout_seconds, group_seconds),
        )
        super().__init__(health, own_lane, rank=rank, size=size, timeout_seconds=timeout_seconds)
        self._processes = {peer: process for peer, process in enumerate(processes) if process is not None}
        if exchanges_notices:
            self.exchange_notices(connection)

    def exchange_notices(self, connection: StoreConnection | None = None) -> None:
        """Exchange notices with the other ranks at a store from now on. For `connection`, see the class."""
        if self.size > 1:
            connection = connection or StoreConnection(self._group.get_group_store())
            medium = StoreMedium(connection, rank=self.rank, size=self.size)
            self.health.exchange_notices(medium, self._processes)

    @property
    def name(self) -> str:
        names = set(self.backends.values())
        if len(names) == 1:
            return next(iter(names))
        return ", ".join(f"{backend} ({device})" for device, backend in sorted(self.backends.items()))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. The value is None once the transport is closed."""
        group: dist.ProcessGroup | None = self._group
        return group

    @property
    def other_devices(self) -> list[str]:
        """The backend of each device type of this machine other than "cpu", such as "nccl (cuda)"."""
        others = {device: backend for device, backend in self.backends.items() if device != "cpu"}
        if set(self.backends.values()) == {"gloo"}:  # Gloo registers for every type of device
            present = torch.accelerator.current_accelerator(check_available=True)
            others = {device: "gloo" for device in others if present is not None and device == present.type}
        return [f"{backend} ({device})" for device, backend in sorted(others.items())]

    @property
    def control_device(self) -> torch.device:
        if "cpu" in self.backends or not self.backends:
            return torch.device("cpu")
        return torch.device(next(iter(self.backends)), torch.accelerator.current_device_index())

    def _goes_through_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is copied to the host before it is sent: a tensor on a GPU that Gloo sends."""
        return not tensor.is_cpu and self.backends.get(tensor.device.type) == "gloo"

    # ------------------------------------------------------------------ operations

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if self.size == 1:
            return self._done_alone()
        if self._goes_through_host(tensor):
            return through_host(tensor, tensor, lambda host, _: self._start_all_reduce(host, op))
        wire, back = reducible(tensor, op)
        finish = put_back(tensor, wire, back)
        if op == "mean" and not self._has_mean:
            finish = partial(divide, tensor, self.size)
        group, options = self._group, self._options.all_reduce[op]
        return self._start("all_reduce", op, tensor, lambda: group.allreduce([wire], options), finish)

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if self.size == 1:
            return self._done_alone(output, input)
        if self._goes_through_host(input):
            return through_host(
                output, input, lambda part, whole: self._start_reduce_scatter(part, whole, op)
            )
        wire, back = reducible(input, op)
        if back is None:
            part, _ = reducible(output, op)
        else:
            part = torch.empty(output.numel(), dtype=wire.dtype, device=output.device)
        finish = put_back(output, part, back)
        if op == "mean" and not self._has_mean:
            finish = partial(divide, output, self.size)
        group, options = self._group, self._options.reduce_scatter[op]
        if self.backends.get(wire.device.type) == "gloo":
            # Gloo reduces all elements, too. But nothing can interrupt the wait of its reduce_scatter.
            whole, as_all_reduce = wire.clone(), self._options.all_reduce[op]
            finish = partial(_take_part, part, whole.view(self.size, -1)[self.rank], finish)
            return self._start(
                "reduce_scatter", op, input, lambda: group.allreduce([whole], as_all_reduce), finish
            )
        return self._start(
            "reduce_scatter", op, input, lambda: reduce_scatter_flat(group, part, wire, options), finish
        )

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if self.size == 1:
            return self._done_alone(output, input)
        if self._goes_through_host(input):
            return through_host(output, input, self._start_all_gather)
        whole, part = movable(output), movable(input)
        group, options = self._group, self._options.all_gather
        return self._start("all_gather", "", input, lambda: all_gather_flat(group, whole, part, options))

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if self.size == 1:
            return self._done_alone()
        if self._goes_through_host(tensor):
            return through_host(tensor, tensor, lambda host, _: self._start_broadcast(host, src))
        wire = movable(tensor)
        group, options = self._group, self._options.broadcast[src]
        return self._start("broadcast", f"from rank {src}", tensor, lambda: group.broadcast([wire], options))

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        if self._goes_through_host(tensor):
            tensor = host_copy(tensor)
        wire = movable(tensor)
        return self._start(
            "send", f"to rank {dst}", tensor, lambda: self._message(self._group.send, wire, dst)
        )

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        if self._goes_through_host(tensor):
            return through_host(tensor, tensor, lambda host, _: self._start_recv(host, src))
        wire = movable(tensor)
        return self._start(
            "recv", f"from rank {src}", tensor, lambda: self._message(self._group.recv, wire, src)
        )

    def _message(self, start: Callable[[list[Tensor], int, int], Any], wire: Tensor, peer: int) -> Any:
        work = start([wire], peer, 0)
        return MessageWork(work, self.timeout_seconds) if wire.device.type == "cpu" else work

    def _start_barrier(self) -> Work:
        if self.size == 1:
            return self._done_alone()
        return self._start("barrier", "", None, lambda: self._group.barrier(self._options.barrier))

    def _start(
        self,
        operation: str,
        detail: str,
        tensor: Tensor | None,
        start: Callable[[], Any],
        finish: Callable[[], object] | None = None,
    ) -> Work:
        self._check_usable()
        if operation not in MESSAGES:
            self.own_lane.num_started += 1
        work = C10dWork(self, operation, detail, tensor)
        try:
            work.start(start, finish)
        except RuntimeError as error:
            raise FailedWait(self.health, work).broken_by(error) from error
        return work

    def _done_alone(self, output: Tensor | None = None, input: Tensor | None = None) -> Work:
        """Do an operation in a group of one rank: copy `input` to `output` unless they are None, and return `DONE`."""
        if self.health.failure is not None:
            raise self.health.error()
        if output is not None and input is not None:
            output.detach().view(-1).copy_(input.detach().view(-1))
        return DONE

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        """Return a lane with its own process group if all backends are Gloo, else return this transport itself.

        NCCL and MPI need no lanes, because they keep different calls apart or raise an error.
        """
        if self.size == 1 or set(self.backends.values()) != {"gloo"}:
            return self
        tokens = exchange(self, f"a lane for {purpose}", [], payload=secrets.token_bytes(8))
        group = self._new_group(list(range(self.size)), tokens[0], _GatheringOver(self))
        lane = self._lane_over(group, self.numbered(purpose))
        lane._start_barrier().wait()  # a rank that closes the lane at once would disconnect ranks that still connect
        return lane

    def lane_among(
        self, ranks: list[int], name: str, token: bytes
    ) -> tuple[C10dTransport, Callable[[], None]]:
        """Create a Gloo lane between some of the ranks, for CPU tensors. Only these ranks call this method.

        On the lane, the ranks are numbered from 0. But errors name each rank by its number in this transport. No rank
        is allowed to close the lane before all ranks in `ranks` have created it. Call `prepare_groups` before.

        Args:
            ranks: the ranks of this transport that are on the lane, including this rank.
            name: the name of the lane in messages.
            token: eight random bytes, which are the same on all ranks of the lane.

        Returns:
            The lane, and a function to call once all ranks in `ranks` have created it. The function deletes from the
            store what this rank has written.
        """
        gather = self._gathering_of(ranks, token)
        group = self._new_group(ranks, token, gather, {"cpu": "gloo"})
        lane = self._lane_over(group, name)
        lane.rank, lane.size = ranks.index(self.rank), len(ranks)
        return lane, gather.forget

    def _lane_over(self, group: dist.ProcessGroup, name: str) -> C10dTransport:
        """Return a lane that sends over `group`, and that destroys `group` when it is closed."""
        lane = self._copy_for(Lane(name, group, barrier_device=self.own_lane.barrier_device))
        lane._group, lane._owns_group = group, True
        self.health.lanes.append(lane.own_lane)
        return lane

    def split(self, color: int | None) -> Transport | None:
        if self.size == 1:
            return None if color is None else transport_of_one_rank(self.timeout_seconds, self.board)
        if "mpi" in self.backends.values():
            raise ValueError(
                "split is not supported with MPI, because MPI can create a group only if all ranks take part. Call "
                "torch.distributed.new_group on all ranks instead, and pass the new group to C10dTransport"
            )
        self.prepare_groups()
        mine = _SPLIT.pack(color is not None, color or 0, secrets.token_bytes(8))
        rows = [_SPLIT.unpack_from(row) for row in exchange(self, "split", [], payload=mine)]
        members = [
            (rank, token)
            for rank, (takes_part, its_color, token) in enumerate(rows)
            if takes_part and its_color == color
        ]
        if color is None:
            return None
        if len(members) == 1:
            return transport_of_one_rank(self.timeout_seconds, self.board)
        ranks, token = [rank for rank, _ in members], members[0][1]
        gather = self._gathering_of(ranks, token)
        group = self._new_group(ranks, token, gather)
        connection = self.health.notices.connection
        child = C10dTransport(
            group,
            timeout_seconds=self.timeout_seconds,
            board=self.board,
            connection=None if connection is None else connection.under(group.group_name),
            processes=[self._processes.get(one) for one in ranks],
        )
        child._owns_group, child._messages = True, self._messages
        child._start_barrier().wait()
        gather.forget()
        return child

    def prepare_groups(self) -> None:
        """Open the connection over which some ranks exchange the addresses of new groups, if it is not open yet.

        Call this before a collective call that precedes the creation of such a group. If the DNS does not answer, the
        connections of many ranks take longer (see `StoreConnection`) than a rank may wait for the others' addresses.
        """
        self._check_usable()
        if self._messages is None:
            timeout = timedelta(seconds=self._connect_seconds)
            self._messages, _ = clone_of(self._group.get_group_store(), timeout)

    @property
    def _connect_seconds(self) -> float:
        """The timeout of a new group between ranks that are all about to connect.

        A Gloo group uses its own timeout only while it connects. So a rank that is lost meanwhile is noticed early.
        """
        is_gloo = set(self.backends.values()) == {"gloo"}
        return min(self.timeout_seconds, _CONNECT_SECONDS) if is_gloo else self.timeout_seconds

    def _gathering_of(self, ranks: list[int], token: bytes) -> StoreGathering:
        """Return the function by which some of these ranks exchange the addresses of a new group.

        Once all ranks are connected, call its method `forget`. The store is best reached over another connection than
        the group's own, because a thread of the program can wait on that one as long as it likes.
        """
        return StoreGathering(
            SignedStore(PrefixStore(name_of_new_group(token), self._messages)),
            "addresses",
            rank=ranks.index(self.rank),
            size=len(ranks),
            timeout_seconds=self._connect_seconds,
            purpose="while a process group was created",
            has_ended=lambda peers: [peer for peer in peers if ranks[peer] in self.lost_ranks()],
            may_raise=True,
        )

    def lost_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes have ended. Raise the failure of the group, if it has one."""
        self.health.raise_if_published()
        return self.health.ended_ranks()

    def _new_group(
        self, ranks: list[int], token: bytes, gather: Gather, backends: dict[str, str] | None = None
    ) -> dist.ProcessGroup:
        """Create a process group of some of these ranks; see `new_group`. Only these ranks call this method."""
        try:
            return new_group(
                self._group,
                ranks,
                token,
                gather,
                backends=backends or self.backends,
                timeout_seconds=self._connect_seconds,
            )
        except RuntimeError as error:
            if isinstance(error, SynclineError) and not isinstance(error, CollectiveTimeout):
                raise
            others = describe_ranks(ranks)
            text = f"rank {self.rank} could not create a process group of {others} for a lane or a split: {error}"
            raise self.health.failed(Failure(PeerLost, text)) from error

    def _release(self) -> None:
        # A referenced Gloo group keeps its threads, and whoever drops the last reference waits for them. So a closed
        # transport keeps no reference.
        groups, self._group = [self._group], None
        self._messages = None
        self.own_lane.group = None
        if self._owns_group:
            destroy(groups)


class _GatheringOver:
    """A function by which all ranks of a transport exchange the addresses of a new group, without a store."""

    def __init__(self, transport: C10dTransport) -> None:
        self._transport = transport

    def __call__(self, payload: bytes, /) -> list[bytes]:
        return self._transport.all_gather_bytes(payload)

    def check_processes(self) -> None:
        """Raise an error if the process of another rank is known to have ended, or the group has failed."""
        if lost := self._transport.lost_ranks():
            text = (
                f"{describe_ranks(lost)} was lost while a process group was created: {end_of_processes(lost)}"
            )
            raise self._transport.health.failed(Failure(PeerLost, text))


def _take_part(part: Tensor, reduced: Tensor, finish: Callable[[], object] | None) -> None:
    fill(part, reduced)
    if finish is not None:
        finish()
