"""The engine whose other ranks are imitated: one process runs a step of a job of any size, for `syncline explain`.

Each imitated rank does exactly what this rank does, with equal values. So a mean is the value itself, a sum is a
multiple of it, a gather repeats it, and a broadcast changes nothing. Operations are complete when they have started:
there are no other processes, so nothing is sent, and no time that belongs to communication can be measured.

The results are those of equal ranks, except where ranks divide work: what an imitated rank would have computed for a
part of its own is not known here. A gather then repeats this rank's part in place of the others, and memory that ranks
share keeps its former values in the parts of the others.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.errors import PeerFailed, SynclineError
from syncline.liveness.board import Board
from syncline.transport.base import ReduceOp, Transport
from syncline.transport.work import DONE, Work


class MirrorTransport(Transport):
    """A transport of one process that stands for `size` ranks. The others are imitated.

    Args:
        rank: this rank.
        size: number of ranks.
        timeout_seconds: the timeout that the ranks would have. Nothing waits here.
        has_shared_memory: whether the ranks would share memory, as on one host. Buckets and shards are laid out as for
            such ranks then.
        group: the process group with the same ranks; None if there is none.
        board: see `Transport`.

    Examples:
        >>> mirror, x = MirrorTransport(rank=0, size=4, timeout_seconds=60.0), torch.tensor([3.0])
        >>> mirror.all_reduce(x, "sum").wait()
        >>> x
        tensor([12.])
    """

    imitates_peers = True

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        has_shared_memory: bool = True,
        group: ProcessGroup | None = None,
        board: Board | None = None,
    ) -> None:
        super().__init__(rank=rank, size=size, timeout_seconds=timeout_seconds, board=board)
        self._has_shared_memory = has_shared_memory
        self._group = group
        self._sent: dict[int, deque[Tensor]] = {}
        """For each other rank, the messages to it that no imitated rank has repeated yet."""
        self._expected: dict[int, deque[_Arrival]] = {}
        """For each other rank, the receives from it that have no message yet."""
        self._reason = ""
        """Why the group has ended; empty if it has not."""

    @property
    def name(self) -> str:
        return f"{'shared memory' if self._has_shared_memory else 'torch.distributed'}, imitated"

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    @property
    def sees_calls(self) -> bool:
        return True

    def rounds_once(self, device: torch.device) -> bool:
        return self._has_shared_memory and device.type == "cpu"

    @property
    def reduces_in_place(self) -> bool:
        return self._has_shared_memory

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if not self._has_shared_memory or device.type != "cpu":
            return None
        return torch.zeros(numel, dtype=dtype, device=device)

    def split(self, color: int | None) -> MirrorTransport | None:
        """Return a transport with the same ranks, because the imitated ranks pass the same color."""
        self._check()
        if color is None:
            return None
        return MirrorTransport(
            rank=self.rank,
            size=self.size,
            timeout_seconds=self.timeout_seconds,
            has_shared_memory=self._has_shared_memory,
            board=self.board,
        )

    def abort(self, reason: str, *, traceback: str = "") -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self._group = None

    # ------------------------------------------------------------------ operations

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        self._check()
        _reduce(tensor, op, self.size)
        return DONE

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        self._check()
        numel = output.numel()
        _copy(output, input.detach().view(-1)[self.rank * numel : (self.rank + 1) * numel])
        _reduce(output, op, self.size)
        return DONE

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        self._check()
        with torch.inference_mode():
            own = input.detach().view(-1)
            if own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
                own = own.clone()  # a part of the output
            output.detach().view(self.size, own.numel()).copy_(own)
        return DONE

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        self._check()
        return DONE

    def _start_barrier(self) -> Work:
        self._check()
        return DONE

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        self._check()
        expected = self._expected.get(dst)
        if expected:
            expected.popleft().fill(tensor.detach().view(-1))
        else:
            self._sent.setdefault(dst, deque()).append(tensor.detach().view(-1).clone())
        return DONE

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        self._check()
        arrival = _Arrival(self, tensor, src)
        sent = self._sent.get(src)
        if sent:
            arrival.fill(sent.popleft())
        else:
            self._expected.setdefault(src, deque()).append(arrival)
        return arrival

    def _find(self, src: int) -> None:
        """Fill the receives from a rank with messages to other ranks, as where each rank sends to the next one.

        Messages and receives are matched in their order. The numbers of elements and the dtypes must be equal.
        """
        expected = self._expected[src]
        while expected:
            target = expected[0].target
            fitting = [
                messages
                for messages in self._sent.values()
                if messages and messages[0].numel() == target.numel() and messages[0].dtype is target.dtype
            ]
            if not fitting:
                return
            expected.popleft().fill(fitting[0].popleft())

    def _check(self) -> None:
        if self._reason:
            raise PeerFailed(f"rank {self.rank}: the group has ended: {self._reason}")


class _Arrival(Work):
    """A receive. The imitated rank sends what this rank sends: to it, or else to another rank."""

    __slots__ = ("_is_filled", "_transport", "src", "target")

    def __init__(self, transport: MirrorTransport, target: Tensor, src: int) -> None:
        self.target, self.src = target, src
        self._transport = transport
        self._is_filled = False

    def fill(self, values: Tensor) -> None:
        """Write a message into the target. Of a message of another length, as many elements as fit are written."""
        numel = min(values.numel(), self.target.numel())
        _copy(self.target.detach().view(-1)[:numel], values[:numel])
        self._is_filled = True

    def wait(self, timeout_seconds: float | None = None) -> None:
        if not self.is_completed():
            raise SynclineError(
                f"rank {self._transport.rank} receives from rank {self.src}, which is imitated and sends what this "
                "rank sends, but this rank has sent no such message. `syncline explain` cannot run programs whose "
                "ranks do different things: run this one with `syncline run --trace`, and read `syncline report`"
            )

    def is_completed(self) -> bool:
        if not self._is_filled:
            self._transport._find(self.src)
        return self._is_filled


@torch.inference_mode()  # a target may be an inference tensor, which can be written only in this mode
def _copy(target: Tensor, values: Tensor) -> None:
    target.detach().view(-1).copy_(values.detach().view(-1))


@torch.inference_mode()
def _reduce(tensor: Tensor, op: ReduceOp, size: int) -> None:
    """Replace a tensor by its reduction over `size` ranks that all have the same values."""
    values = tensor.detach()
    if op in ("mean", "max", "min"):
        return
    is_whole = not (values.dtype.is_floating_point or values.dtype.is_complex)
    wide = values.to(torch.int64) if is_whole else values
    values.copy_(wide * size if op == "sum" else wide**size)
