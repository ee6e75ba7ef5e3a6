"""Signals to the launcher, and the workers they are meant for.

The first signal goes to the workers, which get a few seconds to end; then, or at the second signal, they are
killed. Torch's launcher has handlers of its own, but a second Ctrl-C starts its waiting anew, and it takes
SIGHUP even under nohup. SIGTERM and SIGUSR1 ask the ranks to stop where they can go on later (`stops.py`): the first
gives them time to save; the second sets no limit at all, for it is what a scheduler sends long before the end.

Ranks that stop because they were asked to: told by a signal, waited for, and not taken for failures.

[Note: signals for ranks]

Torch's launcher sends a signal to the whole process group of each rank and ends what is left half a minute later, takes
exit code 75 (`EXIT_STOPPED`) of a rank for a failure, ends the others at once, and starts all of them again where
restarts are allowed. Workers of a DataLoader are in that group: they end at once, and then their rank with an error.
So SIGTERM and SIGUSR1 are handed to the ranks themselves, and nothing else is done until these have ended.

When a worker is killed, its peers get a moment to say where that met them, before they are ended.

The launcher beneath ends all other workers in the same breath in which it sees a death. Those find out by themselves
within milliseconds, and raise an error that names rank, step and collective, which is all that is known of a death
without words. Whether they are faster than the launcher would be a matter of luck.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext

from syncline._torch import elastic
from syncline.session.stop_request import EXIT_STOPPED

__all__ = [
    "Ended",
    "Interruption",
    "PassOn",
    "Stops",
    "kill_left_behind",
    "kill_workers",
    "time_for_last_words",
    "worker_groups",
]


Ended = dict[int, tuple[int, int]]
"""Process number and exit code by local rank, in the order in which the ends were seen."""

_POLL_SECONDS = 0.01

_ORDERLY = (-signal.SIGINT, -signal.SIGTERM)
"""Exit codes of workers that somebody has asked to end: of these nobody needs to be told."""


@contextlib.contextmanager
def time_for_last_words(seconds: float, note: Callable[[Ended], None]) -> Iterator[None]:
    """While this is open, workers whose peer was killed have `seconds` to end by themselves.

    Args:
        seconds: how long.
        note: called with the workers that have ended, before the launcher ends the others.
    """
    if not elastic.CLOSE.is_there:
        yield
        return

    def make(close: Callable[..., None]) -> Callable[..., None]:
        def close_later(ranks: SubprocessContext, *args: Any, **kwargs: Any) -> None:
            note(_wait_for_ends(ranks, seconds))
            close(ranks, *args, **kwargs)

        return close_later

    with elastic.CLOSE.replaced(make):
        yield


def _wait_for_ends(ranks: SubprocessContext, seconds: float) -> Ended:
    """Return the workers that have ended; if one was killed, wait until all have, or the time is up."""
    workers = {local_rank: handler.proc for local_rank, handler in ranks.subprocess_handlers.items()}
    ended: Ended = {}

    def look() -> None:
        for local_rank, worker in workers.items():
            code = worker.poll()
            if code is not None:
                ended.setdefault(local_rank, (worker.pid, code))

    look()
    if any(code < 0 and code not in _ORDERLY for _, code in ended.values()):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(ended) < len(workers):
            time.sleep(_POLL_SECONDS)
            look()
    return ended


class PassOn(Protocol):
    """See `Stops.pass_on`."""

    def __call__(self, number: signal.Signals, *, ends: bool) -> bool: ...


class Interruption:
    """While entered, turns the first of `signals` into torch's SignalException, the next into `kill`.

    SIGTERM is passed on first, where there is somebody to take it; so is SIGUSR1, always, and nothing else comes of it.

    Must be entered in the main thread. A signal that is ignored when it is entered stays ignored (nohup).

    Args:
        signals: names such as "SIGINT".
        grace_seconds: how long after the first signal `kill` is called anyway.
        saving_seconds: the same after SIGTERM.
        note: called at the first signal, before the workers get it.
        pass_on: hands a signal to the ranks, see `Stops.pass_on`.
        kill: ends the workers at once.
    """

    def __init__(
        self,
        signals: Sequence[str],
        *,
        grace_seconds: float,
        saving_seconds: float,
        note: Callable[[], None],
        pass_on: PassOn,
        kill: Callable[[], None],
    ) -> None:
        self._signals = [signal.Signals[name] for name in signals]
        self._grace_seconds = grace_seconds
        self._saving_seconds = saving_seconds
        self._note = note
        self._pass_on = pass_on
        self._kill = kill
        self._replaced: dict[signal.Signals, Any] = {}
        self._is_over = False
        self._num_received = 0
        self.received: signal.Signals | None = None
        """The first signal that came."""

    def __enter__(self) -> Interruption:
        for number, handle in [
            *((n, self._handle) for n in self._signals),
            (signal.SIGUSR1, self._hand_over),
        ]:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._replaced[number] = signal.signal(number, handle)
        self._replaced[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: self._kill())
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)

    def end(self) -> None:
        """The workers are gone, only the report is left to write: a signal or two change nothing from now on."""
        self._is_over = True

    def _hand_over(self, number: int, frame: FrameType | None) -> None:
        self._pass_on(signal.Signals(number), ends=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._num_received += 1
        if self._num_received > 2:
            if not self._is_over:
                self._kill()
            os._exit(
                128 + (self.received or number)
            )  # whatever holds us up: nobody may be reading our output
        if self._is_over:
            return
        if self.received is None:
            self.received = signal.Signals(number)
            self._note()
            is_stop = self.received == signal.SIGTERM
            seconds = self._saving_seconds if is_stop else self._grace_seconds
            # A timer of the kernel, not a thread: this runs between any two instructions of the main thread.
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
            if is_stop and self._pass_on(self.received, ends=True):
                return
            raise SignalException(f"process {os.getpid()} got {self.received.name}", self.received)
        self._kill()


def worker_groups(mark: str) -> set[int]:
    """The process groups of this process's workers, known by `mark` in their environment."""
    return {group for pid, parent, group in _marked(mark) if parent == os.getpid() and group == pid}


def kill_workers(mark: str) -> None:
    """Kill the process groups of this process's workers, known by `mark` in their environment."""
    for group in worker_groups(mark):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def kill_left_behind(mark: str, groups: set[int]) -> None:
    """Kill what ended workers, known by their process groups, have left running."""
    for pid, _, group in _marked(mark):
        if group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[tuple[int, int, int]]:
    """(pid, parent, process group) of each process with `mark` in its environment (Linux; else none)."""
    wanted = os.fsencode(mark)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted not in (folder / "environ").read_bytes():
                continue
            # "pid (name) state ppid pgrp ...", and the name may hold spaces and brackets.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # ended meanwhile, or another user's
            continue
        yield int(folder.name), int(fields[1]), int(fields[2])


_PATIENCE_SECONDS = 60.0
"""How long after the first rank that has stopped the others may end: all have saved by then."""


class Stops:
    """While entered, looks after ranks that stop.

    Args:
        whole_groups: hand signals to all processes of a rank: it is a command, and who in it listens is not known.
        on_start: called with the pids of all ranks when they have been started, each the leader of a session.
    """

    def __init__(self, *, whole_groups: bool, on_start: Callable[[list[int]], None]) -> None:
        self.have_stopped = False
        """Whether all ranks on this host have ended because they agreed to stop."""
        self._whole_groups = whole_groups
        self._on_start = on_start
        self._ranks: SubprocessContext | None = None
        self._ending: signal.Signals | None = None
        self._stopped_at: float | None = None
        self._replaced = contextlib.ExitStack()
        self._torchs_poll: Callable[[SubprocessContext], RunProcsResult | None]

    def __enter__(self) -> Stops:
        self._replaced.enter_context(elastic.START.replaced(self._make_start))
        self._replaced.enter_context(elastic.POLL.replaced(self._make_poll))
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()
        self._ranks = None

    def _make_start(self, torchs_start: Callable[[SubprocessContext], None]) -> Callable[..., None]:
        def start(ranks: SubprocessContext) -> None:
            torchs_start(ranks)
            self._ranks, self._stopped_at = ranks, None
            self._on_start([rank.pid for rank in _processes(ranks)])

        return start

    def _make_poll(self, torchs_poll: Callable[..., RunProcsResult | None]) -> Callable[..., Any]:
        self._torchs_poll = torchs_poll

        def poll(ranks: SubprocessContext) -> RunProcsResult | None:
            return self._poll_patiently(ranks)

        return poll

    def pass_on(self, number: signal.Signals, *, ends: bool) -> bool:
        """Hand a signal to the ranks that run.

        Args:
            number: which.
            ends: it asks them to end, one way or another; then they are not started again.

        Returns:
            Whether there are any.
        """
        running = [rank for rank in _processes(self._ranks) if rank.poll() is None]
        if running and ends:
            self._ending = number
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                if self._whole_groups:
                    os.killpg(rank.pid, number)
                else:
                    rank.send_signal(number)
        return bool(running)

    def _poll_patiently(self, ranks: SubprocessContext) -> RunProcsResult | None:
        codes = [rank.poll() for rank in _processes(ranks)]
        is_failure = any(code not in (None, 0, EXIT_STOPPED) for code in codes)
        all_ended = None not in codes
        if not is_failure and EXIT_STOPPED in codes:
            if all_ended:
                return self._as_success(ranks)
            self._stopped_at = self._stopped_at or time.monotonic()
            if time.monotonic() - self._stopped_at < _PATIENCE_SECONDS:
                return None
        if self._ending is not None and (is_failure or all_ended):
            raise SignalException(f"process {os.getpid()} got {self._ending.name}", self._ending)
        return self._torchs_poll(ranks)

    def _as_success(self, ranks: SubprocessContext) -> RunProcsResult | None:
        """What torch makes of it, but for the verdict."""
        result = self._torchs_poll(ranks)
        if result is not None:
            result.failures.clear()
            result.return_values = dict.fromkeys(range(ranks.nprocs))
            self.have_stopped = True
        return result


def _processes(ranks: SubprocessContext | None) -> list[Popen[bytes]]:
    return [] if ranks is None else [handler.proc for handler in ranks.subprocess_handlers.values()]
