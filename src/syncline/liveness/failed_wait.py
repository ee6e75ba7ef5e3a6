"""A failed wait: the search for its cause in the reports of all ranks, and the error that names the cause."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from syncline.environment import patience
from syncline.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    SynclineError,
    UnevenInputs,
)
from syncline.liveness.board import Place, Wait, describe_late, describe_places
from syncline.liveness.calls import (
    ENDLESS_WAIT,
    LATE,
    ONE_RANK_EVALUATES,
    SAME_CALLS,
    Call,
    Failure,
    remedy_for_left,
)
from syncline.liveness.deadlock import absent_ranks, different_calls, left_ranks, stuck_ranks
from syncline.liveness.health import Health, Waiting
from syncline.liveness.notices import SIGN_OF_LIFE_SECONDS
from syncline.user_code import user_code
from syncline.words import describe_ranks, end_of_processes


class FailedWait:
    """A failed wait of this rank, whose methods find the cause and return the error that names it.

    Each method, except `raise_if_endless`, marks the group as failed, publishes the failure, and returns the error to
    raise on this rank. If a peer has already published the cause, the error names the published cause.

    Args:
        health: the state of the group.
        work: the operation for which this rank waited.
    """

    def __init__(self, health: Health, work: Waiting) -> None:
        self._health = health
        self._work = work

    def timed_out(self, timeout_seconds: float, error: RuntimeError | None = None) -> SynclineError:
        """Return the error for a wait that was not over after `timeout_seconds`. No rank is known to have failed.

        Args:
            timeout_seconds: the timeout.
            error: the error of the backend, if the backend has noticed it.
        """
        health, wait = self._health, self._work.as_wait()
        places, processes = health.places(), health.notices.processes_here()
        absent = absent_ranks(wait, places)
        unseen = [rank for rank in range(health.size) if rank not in places]
        what = describe_late(sorted([*absent, *unseen]), places, health.place(), wait.words, timeout_seconds)
        remedy = LATE
        if here := [rank for rank in absent if rank in processes]:
            remedy += f". Stack of rank {here[0]}: py-spy dump --pid {processes[here[0]].pid}"
        return self._ended(CollectiveTimeout, what, remedy, places, error)

    def broken_by(self, error: RuntimeError) -> SynclineError:
        """Return the error of Syncline that corresponds to an error of the backend."""
        kind, what, remedy = _meaning(str(error))
        if kind is PeerLost:
            return self._connection_lost(error)
        published = self._health.notices.failure()
        if published is not None and published.kind is PeerFailed:
            return self._health.adopted(published)
        if kind is CollectiveTimeout:
            return self.timed_out(self._work.timeout_seconds, error)
        return self._ended(kind, what, remedy, None, error)

    def lost(self, ranks: Sequence[int]) -> SynclineError:
        """Return the error for a wait in which the processes of these ranks have ended."""
        published = self._health.notices.failure()
        if published is not None:
            return self._health.adopted(published)
        places = self._health.places()
        killed = [rank for rank in ranks if rank not in places or not places[rank].has_left]
        if not killed:
            return self._left(ranks, places)
        what = f"{describe_ranks(killed)}: {end_of_processes(killed)}"
        return self._ended(PeerLost, what, _SEE_LOG, places)

    def _connection_lost(self, error: RuntimeError) -> SynclineError:
        """Return the error for a closed connection. The error names the ended peers if their end is detected in time.

        When a process ends, its connections close a moment before the kernel reports the process as ended. So this
        method waits a while for such a report, or for a failure that another rank publishes. A rank that raises an
        error also closes its connections, but it publishes the cause first.
        """
        health = self._health
        first = health.places()
        began = time.monotonic()
        # An ended process on this host is detected at once. With two ranks, only the other one can be the cause.
        is_seen_here = health.size == 2 or health.are_all_here()
        patience_seconds = _LOCAL_CAUSE_SECONDS if is_seen_here else _REMOTE_CAUSE_SECONDS
        places, pause_seconds = first, _PAUSE_SECONDS
        while True:
            looked = time.monotonic()
            ended = health.ended_ranks()
            places = health.places()
            left = [rank for rank, place in sorted(places.items()) if place.has_left]
            if health.notices.failure() is not None or not set(ended) <= set(left):
                return self.lost(ended)
            if left:
                return self._left(left, places)
            if looked > began + patience_seconds:
                break
            time.sleep(pause_seconds)
            pause_seconds = min(1.5 * pause_seconds, _MAX_PAUSE_SECONDS)
        what = "the connection to a peer is lost"
        silent = [rank for rank in first if rank != health.rank and places[rank].seen == first[rank].seen]
        if health.size == 2:
            what = f"the connection to rank {1 - health.rank} is lost"
        elif silent and not is_seen_here:
            what += f", and {describe_ranks(silent)} sent no report for {patience_seconds:g} s"
        cause = _LOST_HERE if health.are_all_here() else _LOST
        return self._ended(PeerLost, what, f"{cause}. {_SEE_LOG}", places, error)

    def _left(self, ranks: Sequence[int], places: dict[int, Place]) -> SynclineError:
        """Return the error for a wait for these ranks, which have shut down normally."""
        have = "has" if len(ranks) == 1 else "have"
        what = f"{describe_ranks(ranks)} {have} shut down normally and will not make this call"
        here = replace(self._health.place(), wait=self._work.as_wait())
        remedy = remedy_for_left(here, [places[rank] for rank in ranks])
        return self._ended(UnevenInputs, what, remedy, places)

    def mismatched(self, calls: dict[int, Call]) -> SynclineError:
        """Return the error for a collective in which the ranks made different calls.

        Args:
            calls: the call that each rank made, by rank.
        """
        health, own = self._health, self._work.as_wait()
        places = self._places_in(own, calls)
        if health.failure is not None:
            return health.error()
        for rank, call in calls.items():
            place = places.get(rank, Place())
            places[rank] = replace(place, wait=replace(own, words=str(call)), has_left=False)
        lines = [_DIFFERENT_CALLS, describe_places(places, size=health.size), SAME_CALLS]
        return health.failed(Failure(CollectiveMismatch, "\n".join(lines), is_common=True))

    def _places_in(self, wait: Wait, ranks: Collection[int]) -> dict[int, Place]:
        """Return the known places of all ranks, by rank, after `ranks` have published that they wait in this call.

        First publish the place of this rank. Then wait, at most for one second, until all of `ranks` have published
        their places. If a rank publishes too late, its last known place is returned, which does not contain its wait.
        If a peer has published a failure meanwhile, raise it.
        """
        health = self._health
        here = replace(health.place(code=user_code(sys._getframe())), wait=wait)
        health.notices.post(lambda: here)
        deadline = time.monotonic() + _PLACES_SECONDS
        while True:
            places = {**health.notices.places(), health.rank: here}
            late = [rank for rank in ranks if rank not in places or not places[rank].is_in(wait)]
            health.raise_if_published()
            if not late or health.failure is not None or time.monotonic() > deadline:
                return {r: replace(p, wait=None, opening=None) if r in late else p for r, p in places.items()}
            time.sleep(_PAUSE_SECONDS)

    def raise_if_endless(self, places: dict[int, Place], steady: dict[int, Place]) -> None:
        """Raise an error if this wait has not failed yet but can never end.

        Args:
            places: the last place of each rank.
            steady: the same places, without the waits that were seen only once.
        """
        health = self._health
        wait = health.position.wait
        if wait is None:
            return
        left = left_ranks(wait, places)
        if left:
            raise self._left(left, places)
        what, stuck = "", stuck_ranks(steady)
        if different_calls(places):
            what = _DIFFERENT_CALLS
        elif stuck:
            what = ENDLESS_WAIT
        if what:
            lines = [what, describe_places(places, size=health.size), SAME_CALLS]
            if any(place.sends_buffers for place in places.values()):
                lines.append(ONE_RANK_EVALUATES)
            text = "\n".join(lines)
            raise health.failed(Failure(CollectiveMismatch, text, is_common=True, stuck_ranks=stuck))

    def _ended(
        self,
        kind: type[SynclineError],
        what: str,
        remedy: str,
        places: dict[int, Place] | None,
        error: Exception | None = None,
    ) -> SynclineError:
        health = self._health
        where = f"on rank {health.rank} of {health.size} over {health.backend}"
        lines = [what, f"{self._work} failed after {self._work.elapsed_seconds():.1f} s {where}"]
        if places is not None:
            lines.append(describe_places(places, size=health.size, ages=health.ages(places)))
        lines.append(remedy)
        if error is not None:
            # Without torch's C++ stack trace
            message = str(error).partition("\nException raised from ")[0].rstrip()
            lines.append(f"{health.backend} reported: {message}")
        return health.failed(Failure(kind, "\n".join(lines)))


_PLACES_SECONDS = patience(1.0)
"""How long a rank that has detected different calls waits for the places of its peers, in seconds."""

_PAUSE_SECONDS = 0.005

_MAX_PAUSE_SECONDS = 0.1

_LOCAL_CAUSE_SECONDS = patience(0.75)
"""How long to search for the cause of a closed connection, in seconds, if the end of each peer is detected at once.

The end of each peer is detected at once if all ranks are on this host, or if there are only two ranks.
"""

_REMOTE_CAUSE_SECONDS = SIGN_OF_LIFE_SECONDS + patience(1.5)
"""How long to search for the cause of a closed connection, in seconds, if ranks on other hosts may have ended.

Each rank that still runs publishes a report within this time.
"""

_DIFFERENT_CALLS = "the ranks made different calls:"

_SEE_LOG = (
    "Look at the log of the rank that ended first: its last lines name the cause, unless a signal killed it"
)

_LOST = "a peer's process has ended, or the network between the hosts has failed"

_LOST_HERE = "a peer's process has ended, or has closed its connections"
"""The cause if all ranks are on this host."""

_ONE_GPU_EACH = (
    "Start one process per GPU, and call torch.cuda.set_device(local_rank) before init_process_group. For a trial on "
    "one GPU, let sl.init() create the process group: it then uses Gloo"
)

_SIGNS_OF_LOSS = ("connect", "broken pipe", "socket", "peer", "pair closure", "ncclremoteerror")


def is_of_backend(error: RuntimeError) -> bool:
    """Return whether this error of a backend means late peers, lost peers, or different calls of the ranks."""
    return _meaning(str(error))[0] is not SynclineError


def _meaning(message: str) -> tuple[type[SynclineError], str, str]:
    """Return three things for a backend's error message: the class of Syncline's error, a description, and a remedy."""
    words = message.lower()
    if "duplicate gpu" in words:
        return SynclineError, "several ranks use one GPU, but NCCL needs one GPU for each rank", _ONE_GPU_EACH
    if "enforce fail" in words or "mismatch" in words:
        what = "the ranks called different operations, or passed different sizes"
        return CollectiveMismatch, what, SAME_CALLS
    if "timed out" in words or "timeout" in words:
        return CollectiveTimeout, "a peer is late", LATE
    if any(sign in words for sign in _SIGNS_OF_LOSS):
        return PeerLost, "the connection to a peer is lost", _SEE_LOG
    return (
        SynclineError,
        "the backend failed",
        "Syncline does not know the cause. The message of the backend follows",
    )
