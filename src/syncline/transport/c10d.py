"""Any torch.distributed process group as a transport: Gloo, NCCL, MPI, UCC, or one backend per device.

The process group's methods are called directly, because this is the hot path of the training step:
`torch.distributed.all_reduce` and similar functions add 3 to 50 us of checks per call, depending on the version of
torch.

This file and `c10d_groups.py` hide the differences between backends. MPI, for instance, has no mean.

Gloo does not report different calls: if sizes do not match, it ends the *process* ("terminate called ...
EnforceNotMet"), and its peers raise `PeerLost`. So the ranks have to agree on sizes first.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections import Counter
from collections.abc import Callable
from copy import copy
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.process_groups import all_gather_flat, reduce_scatter_flat
from syncline.errors import PeerFailed, PeerLost, SynclineError
from syncline.liveness.board import MAIN_LANE, Board
from syncline.liveness.calls import Failure, lane_name
from syncline.liveness.failed_wait import FailedWait
from syncline.liveness.health import CLOSED, Health, Lane
from syncline.liveness.notices import Notices, publisher
from syncline.liveness.processes import FORKED, is_inherited
from syncline.transport.agreement import exchange
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.c10d_groups import (
    CallOptions,
    backends_of,
    destroy,
    group_timeout_seconds,
    movable,
    new_group,
    put_back,
    reducible,
    writing,
)
from syncline.transport.c10d_work import C10dWork, MessageWork
from syncline.transport.threads import ThreadGroup
from syncline.transport.watched_work import MESSAGES
from syncline.transport.work import DONE, Work
from syncline.words import describe_ranks

_BACKENDS_WITH_MEAN = {"gloo", "nccl", "xccl"}

_SPLIT = struct.Struct("<?q8s")
"""A rank's record for a split: whether it takes part, its color, and a random number that may name the group."""


class C10dTransport(Transport):
    """A transport over a torch.distributed process group.

    Args:
        group: the group; None means the default group.
        timeout_seconds: how long a `wait` blocks before it raises `CollectiveTimeout`; None means the
            group's own timeout.
        board: the board of the transport that this is a part of; None for a new board.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group.

    Example:
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
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group "
                "(or syncline.init) first"
            )
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0 or not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"expected a process group that this process is in, got {group!r}")
        if group.size() > 1 and is_inherited(group):
            raise FORKED.on_rank(rank)
        if timeout_seconds is None:
            timeout_seconds = group_timeout_seconds(group)
        super().__init__(rank=rank, size=group.size(), timeout_seconds=timeout_seconds, board=board)
        self._group: Any = group  # None once closed. Typed as Any, because no operation starts after that.
        self._lanes: list[C10dTransport] = []
        self._num_lanes_for: Counter[str] = Counter()
        self._backends = backends_of(group)
        self.own_lane = Lane(MAIN_LANE, group, barrier_device=self.control_device.type)
        self._owns_group = False
        self._has_mean = set(self._backends.values()) <= _BACKENDS_WITH_MEAN
        self._options = CallOptions(
            self.size, self.timeout_seconds, self.control_device, has_mean=self._has_mean
        )
        notices = Notices(group.get_group_store(), rank=rank, size=self.size) if self.size > 1 else None
        self.health = Health(
            self.own_lane,
            self.board,
            notices,
            rank=rank,
            size=self.size,
            backend=self.name,
            timeout_seconds=max(self.timeout_seconds, group_timeout_seconds(group)),
        )
        if notices is not None:
            publisher().add(self.health)

    @property
    def name(self) -> str:
        names = set(self._backends.values())
        if len(names) == 1:
            return next(iter(names))
        return ", ".join(f"{backend} ({device})" for device, backend in sorted(self._backends.items()))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None once the transport is closed."""
        group: dist.ProcessGroup | None = self._group
        return group

    @property
    def other_devices(self) -> dict[str, str]:
        """Backend by device type, for the devices that can be used here besides the CPU."""
        others = {device: backend for device, backend in self._backends.items() if device != "cpu"}
        if set(self._backends.values()) == {"gloo"}:  # Gloo registers for every type of device
            present = torch.accelerator.current_accelerator(check_available=True)
            others = {device: "gloo" for device in others if present is not None and device == present.type}
        return others

    @property
    def is_gloo_on_cpu(self) -> bool:
        """Whether Gloo sends the tensors on the CPU."""
        return self._backends.get("cpu") == "gloo"

    @property
    def control_device(self) -> torch.device:
        if "cpu" in self._backends or not self._backends:
            return torch.device("cpu")
        return torch.device(next(iter(self._backends)), torch.accelerator.current_device_index())

    # ------------------------------------------------------------------ operations

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        if self.size == 1:
            return self._done_alone()
        wire, back = reducible(tensor, op)
        finish = put_back(tensor, wire, back)
        if op == "mean" and not self._has_mean:
            finish = _then_divide(tensor, self.size)
        group, options = self._group, self._options.all_reduce[op]
        return self._start("all_reduce", op, tensor, lambda: group.allreduce([wire], options), finish)

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        if self.size == 1:
            output.detach().view(-1).copy_(input.detach().view(-1))
            return self._done_alone()
        wire, back = reducible(input, op)
        if back is None:
            part, _ = reducible(output, op)
        else:
            part = torch.empty(output.numel(), dtype=wire.dtype, device=output.device)
        finish = put_back(output, part, back)
        if op == "mean" and not self._has_mean:
            finish = _then_divide(output, self.size)
        group, options = self._group, self._options.reduce_scatter[op]
        return self._start(
            "reduce_scatter", op, input, lambda: reduce_scatter_flat(group, part, wire, options), finish
        )

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        if self.size == 1:
            output.detach().view(-1).copy_(input.detach().view(-1))
            return self._done_alone()
        whole, part = movable(output), movable(input)
        group, options = self._group, self._options.all_gather
        return self._start("all_gather", "", input, lambda: all_gather_flat(group, whole, part, options))

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        if self.size == 1:
            return self._done_alone()
        wire = movable(tensor)
        group, options = self._group, self._options.broadcast[src]
        return self._start("broadcast", f"from rank {src}", tensor, lambda: group.broadcast([wire], options))

    def _start_send(self, tensor: Tensor, dst: int) -> Work:
        wire = movable(tensor)
        return self._start(
            "send", f"to rank {dst}", tensor, lambda: self._message(self._group.send, wire, dst)
        )

    def _start_recv(self, tensor: Tensor, src: int) -> Work:
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
        health = self.health
        if health.failure is not None:
            raise health.error()
        if self._group is None or health.has_lost_its_group():
            raise CLOSED.on_rank(self.rank)
        thread = get_ident()
        if thread != health.calling_thread:
            health.called_from(thread)
        if operation not in MESSAGES:
            self.own_lane.num_started += 1
        work = C10dWork(self, operation, detail, tensor)
        try:
            work.start(start, finish)
        except RuntimeError as error:
            raise FailedWait(health, work).broken_by(error) from error
        return work

    def _done_alone(self) -> Work:
        if self.health.failure is not None:
            raise self.health.error()
        return DONE

    # ------------------------------------------------------------------ lanes and groups

    def lane(self, purpose: str) -> Transport:
        """Return a lane with a process group of its own if all backends are Gloo, else this transport.

        NCCL and MPI distinguish different calls, or report them, themselves.
        """
        if self.size == 1 or set(self._backends.values()) != {"gloo"}:
            return self
        tokens = exchange(self, f"a lane for {purpose}", [], payload=secrets.token_bytes(8))
        group = self._new_group(list(range(self.size)), tokens[0])
        self._num_lanes_for[purpose] += 1
        lane = copy(self)
        lane._group, lane._owns_group = group, True
        name = lane_name(purpose, self._num_lanes_for[purpose])
        lane.own_lane = Lane(name, group, barrier_device=self.own_lane.barrier_device)
        self.health.lanes.append(lane.own_lane)
        self._lanes.append(lane)
        lane._start_barrier().wait()  # a rank that closes the lane at once would disconnect ranks that still connect
        lane.forget_addresses()
        return lane

    def lane_among(self, ranks: list[int], name: str, token: bytes) -> C10dTransport:
        """Create a Gloo lane between some of the ranks, for tensors on the CPU; only these ranks make the call.

        The ranks are numbered from 0 on the lane, but errors use the numbers of the whole group. No rank may close the
        lane before all of them have created it.

        Args:
            ranks: the ranks that take part, including this one.
            name: the lane's name, for messages.
            token: eight random bytes, the same on all of these ranks.
        """
        lane = copy(self)
        lane._group, lane._owns_group = self._new_group(ranks, token, backend="gloo"), True
        lane.rank, lane.size = ranks.index(self.rank), len(ranks)
        lane.own_lane = Lane(name, lane._group)
        self.health.lanes.append(lane.own_lane)
        self._lanes.append(lane)
        return lane

    def split(self, color: int | None) -> Transport | None:
        if self.size == 1:
            return None if color is None else self._part_of_one()
        if "mpi" in self._backends.values():
            raise ValueError(
                "MPI cannot make a group without the other ranks: call torch.distributed.new_group on all "
                "ranks, and give its result to C10dTransport"
            )
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
            return self._part_of_one()
        group = self._new_group([rank for rank, _ in members], members[0][1])
        child = C10dTransport(group, timeout_seconds=self.timeout_seconds, board=self.board)
        child._owns_group = True
        child._start_barrier().wait()
        child.forget_addresses()
        return child

    def _part_of_one(self) -> Transport:
        part = ThreadGroup(1, self.timeout_seconds).transport(0)
        part.board = self.board
        return part

    def _new_group(self, ranks: list[int], token: bytes, backend: str | None = None) -> dist.ProcessGroup:
        """Create a process group of some of this group's ranks; only its members make the call."""
        backends = self._backends if backend is None else {"cpu": backend}
        try:
            return new_group(
                self._group,
                ranks,
                token,
                backends=backends,
                timeout_seconds=self.timeout_seconds,
            )
        except SynclineError:
            raise
        except RuntimeError as error:
            others = describe_ranks(ranks)
            text = f"rank {self.rank} could not connect to {others} a second time, for a lane or a split: {error}"
            raise self.health.failed(Failure(PeerLost, text)) from error

    def forget_addresses(self) -> None:
        """Delete the addresses used to connect from the store. All ranks of the group must be connected."""
        for device in self._backends:
            with contextlib.suppress(RuntimeError):  # not every store can delete keys
                self._group.get_group_store().delete_key(f"{device}//0/{self.rank}")

    def abort(self, reason: str) -> None:
        self.health.fail(Failure(PeerFailed, reason, aborted_by=self.rank))

    def leave(self) -> None:
        """Inform the peers that this rank leaves in good order: ranks that still wait for it raise `UnevenInputs`."""
        self.health.leave()

    def close(self) -> None:
        group, self._group = self._group, None  # a referenced Gloo group keeps its threads
        if self.own_lane.name == MAIN_LANE:
            self.health.close()
            for lane in list(self._lanes):
                lane.close()
        elif group is not None:
            self._lanes.remove(self)
            self.health.position.mark_lane_closed(self.own_lane)
        if self._owns_group and group is not None:
            self.own_lane.group = None
            groups = [group]
            del group
            destroy(groups)


def _then_divide(target: Tensor, size: int) -> Callable[[], object]:
    def finish() -> None:
        with writing():
            target.detach().div_(size)

    return finish
