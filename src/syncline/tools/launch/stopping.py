"""Signals to the launcher, and the end of its workers.

`Interruption` handles signals to the launcher. The first signal is passed to the workers, which then have a few seconds
to end. After that time, or at the second signal, they are killed. Torch's handlers are replaced, because with them a
second Ctrl-C restarts the wait, and SIGHUP ends the job even under nohup. SIGTERM and SIGUSR1 ask the ranks to stop at
a point from which they can resume. SIGTERM gives them time to save. SIGUSR1 sets no time limit, because schedulers send
it long before the end.

`Stops` passes these two signals to the ranks, waits for ranks that stop as requested, and does not count them as
failures.

[Note: signals for ranks]

Torch's launcher sends a signal to the whole process group of each rank, and half a minute later it ends the remaining
processes. It treats exit code 75 (`EXIT_STOPPED`) of a rank as a failure, ends the other ranks at once, and restarts
all of them if restarts are allowed. Workers of a DataLoader are in the process group. They end at the signal, and their
rank then ends with an error. SIGTERM and SIGUSR1 are therefore sent to the ranks only, and the launcher then waits for
them.

`time_for_last_words` delays the end of the other workers after one was killed. Torch's launcher ends them as soon as it
detects the death. The workers detect it themselves within milliseconds. They raise an error that names rank, step and
collective, which is all that is known about a death without an exception. Without the delay, they might be ended before
they have recorded that error.
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

Ended = dict[int, tuple[int, int]]
"""Process number and exit code by local rank, in the order in which the ends were detected."""

_POLL_SECONDS = 0.01

_ORDERLY = (-signal.SIGINT, -signal.SIGTERM)
"""Exit codes of workers that were asked to end. Their peers need no time to report such an end."""


@contextlib.contextmanager
def time_for_last_words(seconds: float, note: Callable[[Ended], None]) -> Iterator[None]:
    """Give workers `seconds` to end on their own after one of them was killed, while the context is active.

    Args:
        seconds: how long to wait for the workers.
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
    """Return the workers that have ended. If one was killed, first wait until all have ended or the time is up."""
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
    """The type of `Stops.pass_on`."""

    def __call__(self, number: signal.Signals, *, ends: bool) -> bool: ...


class Interruption:
    """A context manager that raises torch's SignalException at the first of `signals`, and calls `kill` at the second.

    If ranks are running, a first SIGTERM is passed on to them instead of raising. SIGUSR1 is always passed on and has
    no other effect.

    Enter it in the main thread. A signal that is ignored at this time stays ignored (nohup).

    Args:
        signals: names such as "SIGINT".
        grace_seconds: time from the first signal until `kill` is called.
        saving_seconds: the same after SIGTERM.
        note: called at the first signal, before the workers receive it.
        pass_on: sends a signal to the ranks, see `Stops.pass_on`.
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
        """The first signal that was received; None before that."""

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
        """Ignore further signals, because the workers have ended. A third signal in all still ends this process."""
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
            )  # end even if this process is blocked, for example on output that is not read
        if self._is_over:
            return
        if self.received is None:
            self.received = signal.Signals(number)
            self._note()
            is_stop = self.received == signal.SIGTERM
            seconds = self._saving_seconds if is_stop else self._grace_seconds
            # Use a kernel timer, not a thread, because this runs between any two instructions of the main thread.
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
            if is_stop and self._pass_on(self.received, ends=True):
                return
            raise SignalException(f"process {os.getpid()} got {self.received.name}", self.received)
        self._kill()


def worker_groups(mark: str) -> set[int]:
    """Return the process groups of this process's workers, which have `mark` in their environment."""
    return {group for pid, parent, group in _marked(mark) if parent == os.getpid() and group == pid}


def kill_workers(mark: str) -> None:
    """Kill the process groups of this process's workers, which have `mark` in their environment."""
    for group in worker_groups(mark):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def kill_left_behind(mark: str, groups: set[int]) -> None:
    """Kill the processes that ended workers left running, found by their process groups and `mark`."""
    for pid, _, group in _marked(mark):
        if group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[tuple[int, int, int]]:
    """Yield (pid, parent, process group) of each process with `mark` in its environment (none except on Linux)."""
    wanted = os.fsencode(mark)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted not in (folder / "environ").read_bytes():
                continue
            # The format is "pid (name) state ppid pgrp ...". The name may contain spaces and brackets.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended, or belongs to another user
            continue
        yield int(folder.name), int(fields[1]), int(fields[2])


_PATIENCE_SECONDS = 60.0
"""How long after the first stopped rank the others may still end. All have saved by the time the first one ends."""


class Stops:
    """A context manager that passes stop signals to the ranks and waits for ranks that stop as requested.

    Args:
        whole_groups: whether to send signals to all processes of a rank. This is needed if a rank is a command, because
            it is unknown which of its processes handles signals.
        on_start: called with the process numbers of all ranks after their start. Each rank is the leader of a session.
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
        """Send a signal to the running ranks.

        Args:
            number: the signal.
            ends: whether the signal asks the ranks to end. If so, they are not restarted.

        Returns:
            True if any rank is running.
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
        """Return torch's result, changed from failure to success."""
        result = self._torchs_poll(ranks)
        if result is not None:
            result.failures.clear()
            result.return_values = dict.fromkeys(range(ranks.nprocs))
            self.have_stopped = True
        return result


def _processes(ranks: SubprocessContext | None) -> list[Popen[bytes]]:
    return [] if ranks is None else [handler.proc for handler in ranks.subprocess_handlers.values()]
