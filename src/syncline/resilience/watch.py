"""The background thread of a training process: it sends a pulse, and watches the pulse of one other process.

[Note: why a process watches another one]

A collective does not end if a member is stopped, or if the network between two hosts fails: no connection closes. So
each member looks for the signs of life of the next member, in rank order; the last one watches the first one. If some
members are cut off, at least one of the others watches one of them. It ends its own collectives, so that the others
stop, too. They then agree on a membership, which takes `patience` if the silent members do not come back.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial

from syncline.environment import patience
from syncline.errors import PeerLost, SynclineError
from syncline.liveness.calls import Failure
from syncline.liveness.connection import StoreSilent
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore
from syncline.resilience.membership import Membership
from syncline.resilience.register import SILENT_SECONDS, Entry, Line
from syncline.transport.watched import WatchedTransport

_PULSE_SECONDS = 0.5

_JOIN_SECONDS = patience(10.0)


@dataclass
class _Neighbour:
    """The member that this process watches in one generation."""

    entry: Entry
    rank: int
    generation: int
    transport: WatchedTransport
    """The transport of the generation."""
    pulse: str = ""
    seen: float = 0.0
    """The time when the last pulse was first seen."""


class Watch:
    """The watch of one process over the next member of its generation."""

    def __init__(self) -> None:
        self._neighbour: _Neighbour | None = None

    def begin(self, membership: Membership, entry: Entry, transport: WatchedTransport) -> None:
        """Watch a member until `end`.

        Args:
            membership: the present generation.
            entry: the member.
            transport: the transport of this generation.
        """
        rank = membership.members.index(entry.name)
        self._neighbour = _Neighbour(entry, rank, membership.generation, transport, seen=time.monotonic())

    def end(self) -> None:
        """Stop watching."""
        self._neighbour = None

    def look(self, line: Line) -> None:
        """Check once. If the neighbour is lost, or the others have stopped, end the collectives of this process."""
        watched = self._neighbour
        if watched is None:
            return
        name = watched.entry.name
        stopping, ended, pulse = f"stopping {watched.generation + 1}", f"ended {name}", f"pulse {name}"
        found = line.ask(partial(SignedStore.readable, keys=[stopping, ended, pulse]))
        now, shown = (
            time.monotonic(),
            found.get(pulse, watched.pulse),
        )  # a missing or unreadable pulse does not count as new
        if shown != watched.pulse:
            watched.pulse, watched.seen = shown, now
        who = f"rank {watched.rank} on {watched.entry.host}"
        if stopping in found:
            self._stop(watched, "other ranks have stopped, to agree on a new membership")
        elif ended in found:
            watched.seen = now  # it has left the loop, as this process is about to
        elif line.lost([name]):
            self._stop(watched, f"the launcher of {who} has seen the end of this process")
        elif now - watched.seen > SILENT_SECONDS and not _runs_here(watched.entry):
            self._stop(watched, f"{who} has shown no sign of life for {SILENT_SECONDS:g} s")

    def has_failed(self, error: Exception) -> None:
        """End the collectives of this process, because it cannot watch or reach the others any more."""
        if self._neighbour is not None:
            self._stop(self._neighbour, str(error))

    def _stop(self, watched: _Neighbour, reason: str) -> None:
        watched.transport.health.fail(Failure(PeerLost, reason))
        if self._neighbour is watched:
            self._neighbour = None


def _runs_here(entry: Entry) -> bool:
    """Return whether a process runs on this host. Its pulse may be missing, because a long call blocks its threads."""
    process, own = entry.process, RankProcess.own()
    if process is None or own is None or process.host != own.host:
        return False
    return not process.has_ended() and not process.is_stopped()


class Pulse:
    """A thread that shows in the register that this process runs, until the object is freed or closed.

    Args:
        line: a connection of the thread's own.
        name: the name of this process.
        watch: the watch to run after each beat.
    """

    def __init__(self, line: Line, name: str, watch: Watch) -> None:
        self._over = threading.Event()
        arguments = line, name, watch, self._over
        self._thread = threading.Thread(target=_beat, args=arguments, name="syncline-pulse", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._over.set)

    def close(self) -> None:
        """End the thread. A thread that waits for a store while Python shuts down would abort the process."""
        self._over.set()
        self._thread.join(_JOIN_SECONDS)


def _beat(line: Line, name: str, watch: Watch, over: threading.Event) -> None:
    number, last_good = 0, time.monotonic()
    while not over.wait(_PULSE_SECONDS):
        number += 1
        try:
            line.ask(partial(SignedStore.set, key=f"pulse {name}", text=str(number)))
            watch.look(line)
            last_good = time.monotonic()
        except StoreSilent:
            pass  # the launcher is suspended, and may be resumed: until then the ranks train on
        except PeerLost as error:
            if not over.is_set():
                watch.has_failed(error)
            return
        except Exception as error:  # the next beat may succeed; no other code reports this failure
            if time.monotonic() - last_good > SILENT_SECONDS:
                watch.has_failed(SynclineError(f"the watch over the next rank fails: {error!r}"))
