"""Ranks as threads whose transport fails on purpose, in a given call on a given rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline import PeerLost
from syncline.transport import ThreadsTransport, Transport

__all__ = ["Fault", "FaultyTransport"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planned failure of one call on one rank. A fault of another rank is ignored."""

    rank: int
    operation: str
    """The name of a method of `Transport`. (`all_gather_bytes` calls `all_gather` twice.)"""
    call: int = 0
    """The number of the call among the calls of this operation on all lanes, from 0; in `step` only, if it is given."""
    step: int | None = None
    error: Exception | type[Exception] = PeerLost

    def __str__(self) -> str:
        during = "" if self.step is None else f" in step {self.step}"
        return f"a fault planned for call {self.call} of {self.operation}{during} on rank {self.rank}"


class FaultyTransport(ThreadsTransport):
    """A copy of a transport that raises the error of a fault instead of a planned call, and then aborts the group."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        vars(self).update(vars(inner))
        self._faults = [fault for fault in faults if fault.rank == inner.rank]
        self._num_calls: Counter[tuple[str, int | None]] = Counter()

    def fail_if_due(self, operation: str) -> None:
        steps = {None, self.board.step}
        calls = [(operation, step, self._num_calls[operation, step]) for step in steps]
        self._num_calls.update((operation, step) for step in steps)
        for fault in self._faults:
            if (fault.operation, fault.step, fault.call) in calls:
                error = fault.error if isinstance(fault.error, Exception) else fault.error(str(fault))
                self.abort(f"{type(error).__name__}: {error}")
                raise error


def _failing(operation: str) -> Callable[..., Any]:
    call = getattr(ThreadsTransport, operation)

    def called(self: FaultyTransport, *args: Any, **settings: Any) -> Any:
        self.fail_if_due(operation)
        return call(self, *args, **settings)

    return called


_DATA = ("all_reduce", "reduce_scatter", "reduce_spans", "all_gather", "broadcast", "send", "recv")

for _operation in (*_DATA, "barrier", "split"):
    setattr(FaultyTransport, _operation, _failing(_operation))
