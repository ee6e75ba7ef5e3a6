"""The handling of signals to the launcher, and of the end of the ranks.

`Interruption` handles signals to the launcher. The first signal is passed to the ranks, which then have a few seconds
to end; one line says so at once. After that time, or at the second signal, the ranks are killed. But SIGTERMs within
two seconds are one signal, because a scheduler can send it to this process in two ways. Torch's handlers are
replaced, because with them a second Ctrl-C restarts the wait, and SIGHUP ends the job even under nohup. SIGTERM and
SIGUSR1 ask the ranks to stop at a point from which they can resume. After SIGTERM, the ranks have more time, so that
they can save. After SIGUSR1, they have no time limit, because schedulers send this signal long before the end of the
job.

`Workers` passes SIGTERM and SIGUSR1 to the ranks, and waits for ranks that stop as requested. It does not count such
ranks as failures.

[Note: signals for ranks]

Torch's launcher sends a signal to the whole process group of each rank, and half a minute later it ends the remaining
processes. If a rank ends with exit code 75 (`EXIT_STOPPED`), torch's launcher treats this as a failure: it ends the
other ranks at once, and restarts all ranks if restarts are allowed. The process group of a rank includes the workers of
its DataLoader. They would end at the signal, and their rank would then fail. SIGTERM and SIGUSR1 are therefore sent to
the ranks' own processes only, and the launcher then waits for the ranks.

[Note: time to report a failed peer]

Torch's launcher ends all ranks as soon as it detects that one of them has failed. The other ranks detect this within
milliseconds, and raise an error that names the rank, the step and the collective. `Workers` therefore waits for up to
two seconds before the ranks are ended, so that they can record this error. So the launcher knows all failures that
occur together, and its message does not depend on which process ends first. The wait ends early if all ranks have
ended.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from subprocess import Popen
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext

from syncline._torch import elastic
from syncline.environment import patience
from syncline.session.process import forget_program_end, has_program_ended
from syncline.session.stop_request import EXIT_STOPPED, SAME_REQUEST_SECONDS
from syncline.tools.launch.guardian import Guardian, is_marked, kill_sessions, running_processes
from syncline.tools.launch.losses import Losses, processes_of
from syncline.tools.launch.output import Ended, say

_POLL_SECONDS = 0.01

REPORT_SECONDS = patience(2.0)
"""The time that the other ranks have to end by themselves and to record their own errors, after a rank has failed."""

_STOPPING_SECONDS = 60.0
"""The time that the other ranks have to end after the first rank has stopped as requested.

When the first rank ends, all ranks have already saved.
"""

GRACE_SECONDS = 5.0
"""The time that ranks have to end after a signal, until they are killed."""

_SAVING_SECONDS = 30.0

_LINGERING_SECONDS = 30.0

_ORDERLY = (-signal.SIGINT, -signal.SIGTERM)
"""The exit codes of ranks that were ended by a request. Their peers need no time to report such an end."""


class Workers:
    """The ranks of a job on this host, as a context manager inside which torch's launcher runs.

    The context replaces the functions with which torch's launcher starts, polls and ends the ranks.

    Args:
        mark: the job's mark, a text that the environment of each rank contains.
        guardian: the guardian, which receives the process numbers of all ranks when they start.
        whole_groups: whether to send signals to the whole process group of a rank, instead of its first process only.
            This is needed if a rank is a command, because it is unknown which of its processes handles signals.
        note_ended: a function that is called before the launcher ends the remaining ranks. Its argument is the ranks
            that have already ended.
        losses: the ranks that were lost in `sl.steps`, where the other ranks train on without them. None means that a
            lost rank is a failure.
    """

    def __init__(
        self,
        mark: str,
        guardian: Guardian,
        *,
        whole_groups: bool,
        note_ended: Callable[[Ended], None],
        losses: Losses | None = None,
    ) -> None:
        self.have_stopped = False
        """Whether all ranks on this host have ended because the ranks of the job had agreed to stop."""
        self._mark = mark
        self._guardian = guardian
        self._whole_groups = whole_groups
        self._note_ended = note_ended
        self._losses = losses
        self._first_pids: dict[int, int] = {}
        """The process numbers that torch's agent knows, by local rank."""
        self._error_files: set[str] = set()
        """The error files of all ranks that were started."""
        self._lingering_since: dict[int, float] = {}
        """When the program of a process was seen to have ended; infinity after the process was reported."""
        self._ranks: list[Popen[bytes]] = []
        self._sessions: set[int] = set()  # each rank leads a session and a process group
        self._requested: signal.Signals | None = None
        self._stopped_at: float | None = None
        self._report_until: float | None = None
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> Workers:
        replacements: dict[elastic.Method, Callable[..., Any]] = {
            elastic.START: self._start,
            elastic.POLL: self._poll,
            elastic.PIDS: lambda *_: self._first_pids,
        }
        if self._losses is not None:
            replacements[elastic.EXIT_BARRIER] = self._wait_for_other_hosts
        if elastic.CLOSE.is_there:
            replacements[elastic.CLOSE] = self._close
        for method, replacement in replacements.items():
            self._replaced.enter_context(method.replaced(replacement))
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()
        if self._losses is not None:
            self._losses.end()
        for path in self._error_files:  # perhaps among the logs that the user keeps
            forget_program_end(path)

    @property
    def are_running(self) -> bool:
        """Whether at least one rank is running."""
        return any(rank.poll() is None for rank in self._ranks)

    def pass_on(self, number: signal.Signals) -> bool:
        """Send a signal to all ranks that are running. After SIGTERM, the launcher does not restart them.

        Returns:
            True if at least one rank was running.
        """
        running = [rank for rank in self._ranks if rank.poll() is None]
        if running and number == signal.SIGTERM:
            self._requested = number
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                if self._whole_groups:
                    os.killpg(rank.pid, number)
                else:
                    rank.send_signal(number)
        return bool(running)

    def kill(self) -> None:
        """Kill the process groups of all ranks, including ranks that are still being started."""
        for pid, parent, group, _ in running_processes():
            if parent == os.getpid() and group == pid and is_marked(pid, self._mark):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def kill_left_behind(self) -> None:
        """Kill the processes that are still running in the sessions of ranks."""
        kill_sessions(set(), self._sessions, self._mark)

    def _start(self, start: Callable[..., None], ranks: SubprocessContext) -> None:
        if self._losses is not None:
            self._losses.begin(ranks)
        self._error_files.update(ranks.error_files.values())
        start(ranks)
        self._stopped_at = self._report_until = None
        self._see_started(ranks)
        self._first_pids = {local_rank: rank.pid for local_rank, rank in enumerate(self._ranks)}

    def _see_started(self, ranks: SubprocessContext) -> None:
        self._ranks = processes_of(ranks)
        pids = [rank.pid for rank in self._ranks]
        self._sessions.update(pids)
        self._guardian.watch(self._mark, pids)

    def _poll(
        self, poll: Callable[..., RunProcsResult | None], ranks: SubprocessContext
    ) -> RunProcsResult | None:
        self._name_lingering(ranks)
        # Read the exit codes once: a rank that is lost later is detected in the next poll.
        codes = {rank: process.poll() for rank, process in enumerate(processes_of(ranks))}
        losses, lost = self._losses, set[int]()
        if losses:
            restarted, lost = losses.look(ranks, codes, may_restart=self._requested is None), losses.ranks
            codes = {rank: codes[rank] for rank in codes.keys() - lost} | dict.fromkeys(restarted)
            if restarted:
                self._see_started(ranks)
        are_running, is_any_stopped = None in codes.values(), EXIT_STOPPED in codes.values()
        has_failed = any(code not in (None, 0, EXIT_STOPPED) for code in codes.values())
        if not has_failed and codes and (lost or is_any_stopped):
            if not are_running:
                return self._succeeded(poll(ranks), ranks, has_stopped=is_any_stopped)
            if lost:
                return None  # the others train on
            self._stopped_at = self._stopped_at or time.monotonic()
            if time.monotonic() - self._stopped_at < _STOPPING_SECONDS:
                return None
        if losses and not codes and losses.must_stay():
            return None
        if self._requested is not None and (has_failed or not are_running):
            raise SignalException(f"process {os.getpid()} got {self._requested.name}", self._requested)
        if losses and not has_failed and are_running and not is_any_stopped:
            return None  # torch's `poll` would look again, and end all ranks if one has been lost just now
        return poll(ranks)

    def _name_lingering(self, ranks: SubprocessContext) -> None:
        """Report once each rank whose program has ended, but whose process still runs, and say how to find the cause.

        The process is not killed: it may wait for a thread, or write a file in an `atexit` handler, on purpose.
        """
        now = time.monotonic()
        for local_rank, process in enumerate(processes_of(ranks)):
            if process.poll() is not None or not has_program_ended(ranks.error_files[local_rank]):
                continue
            if now - self._lingering_since.setdefault(process.pid, now) >= _LINGERING_SECONDS:
                self._lingering_since[process.pid] = math.inf
                say(
                    f"rank {ranks.envs[local_rank]['RANK']} (pid {process.pid}) ended its program "
                    f"{_LINGERING_SECONDS:g} s ago, but its process still runs: a thread, an exit handler or a "
                    f"destructor has not ended. To see where: py-spy dump --pid {process.pid}"
                )

    def _succeeded(
        self, result: RunProcsResult | None, ranks: SubprocessContext, *, has_stopped: bool
    ) -> RunProcsResult | None:
        """Turn torch's result into a success. For torch, a lost rank and exit code 75 are failures."""
        if result is not None:
            result.failures.clear()
            result.return_values = dict.fromkeys(range(ranks.nprocs))
            self.have_stopped = has_stopped
        return result

    def _wait_for_other_hosts(self, barrier: Callable[..., None], agent: object) -> None:
        if not (self._losses and self._losses.wait_for_other_hosts()):
            barrier(agent)

    def _close(self, close: Callable[..., None], ranks: SubprocessContext, *args: Any, **kwargs: Any) -> None:
        """End the ranks.

        If a rank has failed, first give the other ranks time to record their errors: wait until all ranks have ended,
        but at most `REPORT_SECONDS`. A second call, after a signal to the launcher, does not begin this time again.
        """
        ended: Ended = {}
        while True:
            for local_rank, rank in enumerate(processes_of(ranks)):
                if (code := rank.poll()) is not None:
                    ended.setdefault(local_rank, (rank.pid, code))
            has_failed = any(code not in (0, EXIT_STOPPED, *_ORDERLY) for _, code in ended.values())
            if not has_failed or len(ended) == ranks.nprocs:
                break
            now = time.monotonic()
            self._report_until = self._report_until or now + REPORT_SECONDS
            if now >= self._report_until:
                break
            time.sleep(_POLL_SECONDS)
        self._note_ended(ended)
        close(ranks, *args, **kwargs)


class Interruption:
    """A context manager that installs the signal handlers of the launcher.

    At the first signal in `signals`, the handler raises torch's SignalException, and torch's launcher then ends the
    ranks. But if the first signal is SIGTERM and ranks are running, the handler passes SIGTERM to the ranks, and raises
    no exception. At the second signal, the handler kills the ranks. SIGUSR1 is always passed to the ranks, and has
    no other effect.

    Enter the context in the main thread. If SIGHUP is ignored at that time, as under nohup, it stays ignored.

    Args:
        workers: the ranks.
        signals: the names of the signals to handle, such as "SIGINT".
        shutdown_seconds: the time from the first signal until the ranks are killed. None means 30 seconds after
            SIGTERM, and 5 seconds after another signal.
    """

    def __init__(self, workers: Workers, signals: Sequence[str], shutdown_seconds: float | None) -> None:
        self._workers = workers
        self._signals = [signal.Signals[name] for name in signals]
        self._shutdown_seconds = shutdown_seconds
        self._replaced: dict[signal.Signals, Any] = {}
        self._is_over = False
        self._num_received = 0
        self._received_at = 0.0
        """The time at which the first signal arrived, by the monotonic clock."""
        self.received: signal.Signals | None = None
        """The first signal, except SIGUSR1, that this handler has received. It is None if there was no signal yet."""

    def __enter__(self) -> Interruption:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]] = dict.fromkeys(
            self._signals, self._handle
        )
        handlers[signal.SIGUSR1] = lambda *_: self._workers.pass_on(signal.SIGUSR1)
        handlers[signal.SIGALRM] = lambda *_: self._workers.kill()
        for number, handler in handlers.items():
            # Under nohup, SIGHUP has to stay ignored. A script starts programs with `&` so that they ignore SIGINT, but
            # there `kill -INT` must still end the job.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._replaced[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)

    def end(self) -> None:
        """Ignore further signals. Call this when the ranks have ended.

        The third signal inside the context still ends this process. Earlier signals count, too.
        """
        self._is_over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM == self.received and now < self._received_at + SAME_REQUEST_SECONDS:
            return
        self._num_received += 1
        if self._num_received > 2:
            if not self._is_over:
                self._workers.kill()
            # End even if this process is blocked, for example because its output is not read.
            os._exit(128 + (self.received or number))
        if self._is_over:
            return
        if self.received is not None:
            self._workers.kill()
            return
        self.received, self._received_at = signal.Signals(number), now
        is_stop = self.received == signal.SIGTERM
        seconds = self._shutdown_seconds
        if seconds is None:
            seconds = _SAVING_SECONDS if is_stop else GRACE_SECONDS
        # Use a kernel timer, not a thread, because this runs between any two instructions of the main thread.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
        if self._workers.are_running:
            # In a thread, because the main thread may just be printing, or the output may block. A `Thread` takes
            # locks when it starts, which the main thread may hold.
            _thread.start_new_thread(say, (_about(self.received, seconds),))
        if is_stop and self._workers.pass_on(self.received):
            return
        raise SignalException(f"process {os.getpid()} got {self.received.name}", self.received)


def _about(received: signal.Signals, seconds: float) -> str:
    """Return a text that says what happens after the first signal."""
    if received == signal.SIGINT:
        return f"interrupted: the ranks have {seconds:g} s to end; press Ctrl-C again to kill them now"
    to_do = "save and end" if received == signal.SIGTERM else "end"
    return f"got {received.name}: the ranks have {seconds:g} s to {to_do}; a second signal kills them"
