"""An engine for tests that fails on purpose, in a given operation on a given rank.

The engine passes all calls to an inner transport, which does the work. So the results of calls without a fault are
bitwise equal to the results of the inner transport. A fault raises its error when its rank starts the operation. A
fault also aborts the inner transport, so that the peers raise an error that names the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from syncline.errors import CollectiveTimeout, PeerLost
from syncline.transport.base import ReduceOp, Team, Transport
from syncline.transport.work import Work

_OPERATIONS = (
    *("all_reduce", "reduce_scatter", "reduce_spans", "all_gather", "broadcast", "send", "recv", "barrier"),
    "split",
)

_ERRORS: dict[str, type[Exception]] = {
    "lost": PeerLost,
    "timeout": CollectiveTimeout,
    "raise": RuntimeError,
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planned failure of one call on one rank.

    Examples:
        >>> Fault(rank=1, operation="all_reduce", call=2, error="timeout")
        Fault(rank=1, operation='all_reduce', call=2, step=None, error='timeout')
    """

    rank: int
    """The rank that fails."""
    operation: str
    """The operation that fails: the name of a method of `Transport`. (`all_gather_bytes` calls `all_gather` twice.)"""
    call: int = 0
    """The number of the failing call among the calls of this operation, from 0.

    If `step` is None, all calls of the operation on this rank are counted. Otherwise only the calls in the step
    `step` are counted.
    """
    step: int | None = None
    """The step in which the operation fails (see `Board.step`); None if the step does not matter."""
    error: Literal["lost", "timeout", "raise"] | Exception = "lost"
    """The exception that the fault raises.

    "lost" stands for `PeerLost`, "timeout" for `CollectiveTimeout`, and "raise" for `RuntimeError`.
    """

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS:
            raise ValueError(
                f"Fault: expected operation to be one of {', '.join(_OPERATIONS)}; got {self.operation!r}"
            )
        if isinstance(self.error, str) and self.error not in _ERRORS:
            raise ValueError(
                f"Fault: expected error to be one of {', '.join(_ERRORS)}, or an exception object; got {self.error!r}"
            )

    def __str__(self) -> str:
        during = "" if self.step is None else f" in step {self.step}"
        return f"a fault planned for call {self.call} of {self.operation}{during} on rank {self.rank}"

    def make_error(self) -> Exception:
        """Return the exception that this fault raises."""
        return self.error if isinstance(self.error, Exception) else _ERRORS[self.error](str(self))


class _Plan:
    """The faults of one rank that have not happened yet, and the counts of this rank's calls on all lanes."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._counted_step: int | None = None
        self._num_started: Counter[str] = Counter()
        self._num_started_in_step: Counter[str] = Counter()

    def due(self, operation: str, step: int | None) -> Fault | None:
        """Count a call of `operation`, and return the fault that is planned for this call.

        Returns None if no fault is planned for the call. Each fault is returned only once.
        """
        if step != self._counted_step:
            self._counted_step = step
            self._num_started_in_step.clear()
        now = (operation, None, self._num_started[operation])
        now_in_step = (operation, step, self._num_started_in_step[operation])
        self._num_started[operation] += 1
        self._num_started_in_step[operation] += 1
        for fault in self._faults:
            if (fault.operation, fault.step, fault.call) == (now if fault.step is None else now_in_step):
                self._faults.remove(fault)
                return fault
        return None


class FaultyTransport(Transport):
    """A transport that passes all calls to another transport, and fails at planned calls.

    Args:
        inner: the transport that does the work.
        faults: the planned failures, each of which happens at most once. All ranks can get the same list, because a
            rank ignores the faults of other ranks.

    Examples:
        >>> from syncline.transport.threads import ThreadGroup
        >>> transport = FaultyTransport(ThreadGroup(1).transport(0), [Fault(rank=0, operation="barrier")])
        >>> transport.barrier()
        Traceback (most recent call last):
        ...
        syncline.errors.PeerLost: a fault planned for call 0 of barrier on rank 0
    """

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        super().__init__(
            rank=inner.rank, size=inner.size, timeout_seconds=inner.timeout_seconds, board=inner.board
        )
        self._inner = inner
        self._plan = _Plan([fault for fault in faults if fault.rank == inner.rank])

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def sees_calls(self) -> bool:
        return self._inner.sees_calls

    @property
    def control_device(self) -> torch.device:
        return self._inner.control_device

    def lane(self, purpose: str) -> Transport:
        """Return a lane that passes all calls to a lane of the inner transport, and that has the same faults.

        The calls on all lanes are counted together.
        """
        inner = self._inner.lane(purpose)
        if inner is self._inner:
            return self
        lane = copy(self)
        lane._inner = inner
        return lane

    def split(self, color: int | None) -> Transport | None:
        """Return the transport that `split` of the inner transport returns. It has no faults."""
        return self._unless_due("split").split(color)

    def team(self, device: torch.device) -> Team:
        return self._inner.team(device)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self._inner.allocate_shared(numel, dtype, device)

    def abort(self, reason: str, *, traceback: str = "") -> None:
        self._inner.abort(reason, traceback=traceback)

    def close(self) -> None:
        self._inner.close()

    def _start_all_reduce(self, tensor: Tensor, op: ReduceOp, terms: int = 0) -> Work:
        return self._unless_due("all_reduce").all_reduce(tensor, op, terms=terms)

    def _start_reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        return self._unless_due("reduce_scatter").reduce_scatter(output, input, op)

    def _start_reduce_spans(self, tensor: Tensor, bounds: Sequence[int], op: ReduceOp) -> Work:
        return self._unless_due("reduce_spans").reduce_spans(tensor, bounds, op)

    def _start_all_gather(self, output: Tensor, input: Tensor, terms: int = 0) -> Work:
        return self._unless_due("all_gather").all_gather(output, input, terms=terms)

    def _start_broadcast(self, tensor: Tensor, src: int) -> Work:
        return self._unless_due("broadcast").broadcast(tensor, src)

    def _start_send(self, tensor: Tensor, dst: int, terms: int = 0) -> Work:
        return self._unless_due("send").send(tensor, dst, terms=terms)

    def _start_recv(self, tensor: Tensor, src: int, terms: int = 0) -> Work:
        return self._unless_due("recv").recv(tensor, src, terms=terms)

    def _start_barrier(self) -> Work:
        return self._unless_due("barrier").barrier()

    def _unless_due(self, operation: str) -> Transport:
        """Return the inner transport.

        If a fault is planned for this call of `operation`, abort the inner transport and raise the fault's error.
        """
        fault = self._plan.due(operation, self.board.step)
        if fault is not None:
            error = fault.make_error()
            self._inner.abort(f"{type(error).__name__}: {error}")
            raise error
        return self._inner
