"""Ranks that stop because they were asked to: told by a signal, waited for, and not taken for failures.

[Note: signals for ranks]

Torch's launcher sends a signal to the whole process group of each rank and ends what is left half a minute later, takes
exit code 75 (`EXIT_STOPPED`) of a rank for a failure, ends the others at once, and starts all of them again where
restarts are allowed. Workers of a DataLoader are in that group: they end at once, and then their rank with an error.
So SIGTERM and SIGUSR1 are handed to the ranks themselves, and nothing else is done until these have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext

from syncline._torch import elastic
from syncline.stopping import EXIT_STOPPED

__all__ = ["Stops"]

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
