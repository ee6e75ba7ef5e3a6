"""The work of an operation in shared memory, which waits until the operation is done."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import SynclineError
from syncline.liveness.calls import Call, Failure
from syncline.liveness.failed_wait import FailedWait
from syncline.transport.shared_memory.core import Outcome, library
from syncline.transport.shared_memory.engine import EngineLane, call_of
from syncline.transport.shared_memory.sockets import Peers
from syncline.transport.watched import WatchedWork
from syncline.transport.work import Disagreement

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

    def enter(
        self,
        engine_lane: EngineLane,
        peers: Peers,
        numbers: Sequence[int],
        queue: int,
        ticket: int,
        peer: int | None,
    ) -> None:
        """Set the operation of the native core that this work represents.

        Args:
            engine_lane: the lane on which the operation was started.
            peers: the processes of the other ranks.
            numbers: for each rank, the number by which error messages name it.
            queue: the number by which the core knows the queue of the operation.
            ticket: the number by which the core knows the operation.
            peer: the other rank of a message. Pass None for a collective.
        """
        self._engine_lane = engine_lane
        self._peers = peers
        self._numbers = numbers
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
