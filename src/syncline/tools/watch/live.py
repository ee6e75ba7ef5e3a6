"""The display of `syncline run --live`: the output of the ranks, and below it a picture of what the ranks are doing."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline import environment
from syncline.tools.launch.display import Display, Writer
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, present, screen, stand_still
from syncline.tools.watch.terminal import Terminal

EVERY_SECONDS = 0.5
"""How often the picture is drawn."""

_OUTPUTS = (1, 2)


def terminal_fd() -> int | None:
    """Return the file descriptor of the terminal on which a picture can be drawn: stderr, else stdout, else None."""
    if environment.variables().get("TERM") == "dumb":
        return None
    return next((fd for fd in (2, 1) if os.isatty(fd)), None)


class Live(Display):
    """A display with a picture. It is a context manager, in which the messages of this process appear above it, too.

    The picture disappears when the ranks have ended. If they stood still and then did not end by themselves, it stays:
    it says where each rank was.

    Args:
        directory: the directory of the trace that the ranks write.
        fd: the file descriptor of the terminal.
        every_seconds: how often to look at the trace.
        has_other_hosts: whether ranks of other hosts take part. They are not shown.
    """

    def __init__(
        self, directory: Path, fd: int, *, every_seconds: float = EVERY_SECONDS, has_other_hosts: bool = False
    ) -> None:
        self._terminal, self._writer = Terminal(fd), Writer()
        self._on_terminal = [one for one in _OUTPUTS if os.isatty(one)]
        self._ranks = LiveRanks(directory, has_other_hosts=has_other_hosts)
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-live", daemon=True)
        self._redirected = contextlib.ExitStack()
        self.show = self._show

    def __enter__(self) -> Live:
        if 1 in self._on_terminal:
            self._redirected.enter_context(contextlib.redirect_stdout(_Above(self._show, 1)))
        if 2 in self._on_terminal:
            self._redirected.enter_context(contextlib.redirect_stderr(_Above(self._show, 2)))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._redirected.close()

    @property
    def output_failure(self) -> OSError | None:
        return self._writer.failure

    def start_ranks(self, ranks: Sequence[int]) -> None:
        self._ranks.start(ranks, time.monotonic())
        if self._thread.ident is None:  # a thread starts once
            self._thread.start()

    def end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._terminal.end(stays=self._ranks.hung())

    def _show(self, fd: int, data: bytes) -> None:
        if fd in self._on_terminal:
            self._terminal.print(data)
        else:
            self._writer.write(fd, data)

    def _run(self) -> None:
        try:
            while True:
                if (lines := self._ranks.look(time.monotonic(), *self._terminal.size)) is not None:
                    self._terminal.draw(lines)
                if self._ended.wait(self._every_seconds):
                    return
        except Exception as error:  # the ranks train on
            self._terminal.end(stays=False)
            print(
                f"syncline run: the live picture ends here: {type(error).__name__}: {error}", file=sys.stderr
            )


class LiveRanks:
    """The ranks of this host, and the picture of them.

    Args:
        directory: the directory of the trace that the ranks write.
        has_other_hosts: whether ranks of other hosts take part, which may write to the same directory.
    """

    def __init__(self, directory: Path, *, has_other_hosts: bool = False) -> None:
        self._follower = Follower(directory)
        self._has_other_hosts = has_other_hosts
        self._lock = threading.Lock()
        self._states: dict[str, RankState] = {}
        """The states of the processes that have recorded something, by the names of their files."""
        self._started: list[RankState] = []
        """What is shown of each rank until its process has recorded something."""
        self._former: set[str] = set()
        """The names of the files of processes of a former attempt."""
        self._stood_still: tuple[int, int] | None = None
        """If the last picture shows a run that stands still: its numbers of events, and of ranks that have ended."""

    def start(self, ranks: Sequence[int], now: float) -> None:
        """Note which ranks are started. They replace all others."""
        with self._lock:
            self._former |= {name for name, _, _ in self._follower.new_rows()} | self._states.keys()
            self._states = {}
            self._started = [RankState(rank, started_at=now) for rank in ranks]
            self._stood_still = None

    def look(self, now: float, columns: int, lines: int) -> list[str] | None:
        """Return the lines of a new picture. Return None if the last one stays, because it says more.

        That is so when ranks stood still, and then ended: how they were ended says nothing about where they were.

        Args:
            now: the time, in seconds of `time.monotonic`.
            columns: the width of the terminal.
            lines: the height of the terminal.
        """
        with self._lock:
            states = self._present()
            num_events, num_ended = _num_events(states), sum(one.end is not None for one in states)
            if self._stood_still is not None:
                events_before, ended_before = self._stood_still
                if num_events == events_before and num_ended > ended_before:
                    return None
            is_still = stand_still(states, now) and any(one.has_place for one in states)
            self._stood_still = (num_events, num_ended) if is_still else None
            where = f" of this host ({len(states)} of {_num_ranks(states)})" if self._has_other_hosts else ""
            title = f"--- the ranks{where} "
            picture = screen(states, now, columns=columns, lines=max(6, 2 * lines // 3))
            return [title.ljust(min(columns - 1, 70), "-"), *picture.splitlines()]

    def hung(self) -> bool:
        """Return whether the last picture shows a run that stands still, which did not end by itself afterwards."""
        with self._lock:
            states = self._present()
            if self._stood_still is None or self._stood_still[0] != _num_events(states):
                return False
            return any(one.end is None or one.end.error for one in states)

    def _present(self) -> list[RankState]:
        for name, found, at in self._follower.new_rows():
            if name not in self._former:
                self._states.setdefault(name, RankState()).add(found, at)
        return present([*self._started, *filter(self._is_here, self._states.values())])

    def _is_here(self, state: RankState) -> bool:
        is_here = state.process is None or state.process.host == socket.gethostname()
        return is_here or not self._has_other_hosts


def _num_events(states: Sequence[RankState]) -> int:
    return sum(one.num_events for one in states)


def _num_ranks(states: Sequence[RankState]) -> str:
    known = [one.process.num_ranks for one in states if one.process is not None]
    return str(max(known)) if known else "?"


class _Above(io.TextIOBase):
    """A stream whose lines appear above the picture."""

    encoding = "utf-8"

    def __init__(self, show: Callable[[int, bytes], None], fd: int) -> None:
        self._show, self._fd, self._rest = show, fd, ""

    def write(self, text: str) -> int:
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._show(self._fd, (whole + newline).encode(errors="replace"))
        return len(text)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return True
