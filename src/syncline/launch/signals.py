"""Signals to the launcher, and the workers they are meant for.

The first signal goes to the workers, which get a few seconds to end; then, or at the second signal, they are
killed. Torch's launcher has handlers of its own, but a second Ctrl-C starts its waiting anew, and it takes
SIGHUP even under nohup. SIGTERM and SIGUSR1 ask the ranks to stop where they can go on later (`stops.py`): the first
gives them time to save; the second sets no limit at all, for it is what a scheduler sends long before the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["Interruption", "PassOn", "kill_left_behind", "kill_workers", "worker_groups"]


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
