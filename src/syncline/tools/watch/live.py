"""The display of `syncline run --live`: the output of the ranks, and below it a picture of their states."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
import unicodedata
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from syncline import environment
from syncline.tools.launch.display import Display, Writer
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, have_hung, screen

_USUAL = os.terminal_size((80, 24))


class Terminal:
    """A terminal with a picture at its lower end.

    No mode of the terminal is changed, and the cursor stays in the line below the picture. So nothing has to be
    restored when this process ends, even if it is killed. Each change is one write, so that nothing flickers.

    Args:
        fd: the file descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = Writer()
        self._lock = threading.Lock()
        """Protects the terminal: one thread draws the picture, and others print lines."""
        self._drawn: list[str] = []
        """The lines of the picture."""

    @property
    def size(self) -> os.terminal_size:
        """The size; 80 x 24 if the terminal does not know it."""
        try:
            found = os.get_terminal_size(self._fd)
        except OSError:  # it was closed
            return _USUAL
        return found if all(found) else _USUAL

    def draw(self, lines: Sequence[str]) -> None:
        """Draw a picture in the place of the last one. Lines that are too long are cut."""
        with self._lock:
            erase, columns = self._erase(), self.size.columns
            self._drawn = [_cut(line, columns - 1) for line in lines]
            self._writer.write(self._fd, erase + self._picture())

    def print(self, data: bytes) -> None:
        """Print complete lines above the picture."""
        with self._lock:
            self._writer.write(self._fd, self._erase() + data + self._picture())

    def _picture(self) -> bytes:
        return "".join(f"{line}\n" for line in self._drawn).encode(errors="replace")

    def _erase(self) -> bytes:
        if not self._drawn:
            return b""
        # If the terminal has become narrower, it has wrapped the lines of the picture.
        columns = self.size.columns
        num_lines = sum(max(1, -(-sum(map(_width_of, line)) // columns)) for line in self._drawn)
        return b"\033[%dA\r\033[J" % num_lines


def _width_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(line: str, columns: int) -> str:
    """Return as much of a line as fits.

    Examples:
        >>> _cut("abc", 2), _cut("a\N{HIRAGANA LETTER A}", 2)
        ('ab', 'a')
    """
    return line[: sum(width <= columns for width in accumulate(map(_width_of, line)))]


_EVERY_SECONDS = 0.5
"""The interval at which the picture is drawn."""


def terminal_fd() -> int | None:
    """Return the file descriptor of the terminal on which a picture can be drawn: stderr, else stdout, else None."""
    if environment.variables().get("TERM") == "dumb":
        return None
    return next((fd for fd in (2, 1) if os.isatty(fd)), None)


class Live(Display):
    """A display with a picture. It is a context manager, in which the messages of this process appear above it, too.

    The picture disappears when the ranks have ended. If the ranks hung until they were ended, it stays, because it
    shows where each rank was.

    Args:
        directory: the directory of the trace that the ranks write.
        fd: the file descriptor of the terminal.
    """

    owns_terminal = True

    def __init__(self, directory: Path, fd: int) -> None:
        super().__init__()
        self._terminal, self._ranks = Terminal(fd), Follower(directory, host=socket.gethostname())
        self._ended, self._has_failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="syncline-live", daemon=True)
        self._redirected = contextlib.ExitStack()

    def __enter__(self) -> Live:
        for fd, redirect in ((1, contextlib.redirect_stdout), (2, contextlib.redirect_stderr)):
            if os.isatty(fd):
                self._redirected.enter_context(redirect(_Above(self._terminal)))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._redirected.close()

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
        with contextlib.suppress(Exception):  # an error of a file of the trace
            if not self._has_failed and have_hung(states := self._ranks.present(), now := time.monotonic()):
                lines = picture(states, now, *self._terminal.size)
                self._terminal.print("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        self._terminal.draw([])

    def show(self, fd: int, data: bytes) -> None:
        if os.isatty(fd):
            self._terminal.print(data)
        else:
            super().show(fd, data)

    def _run(self) -> None:
        self._draw()
        while not self._has_failed and not self._ended.wait(_EVERY_SECONDS):
            self._draw()

    def _draw(self) -> None:
        try:
            self._terminal.draw(picture(self._ranks.present(), time.monotonic(), *self._terminal.size))
        except Exception as error:
            # An error of a file of the trace: the ranks train on, and their own errors are reported in any case.
            self._has_failed = True
            self._terminal.draw([])
            what = f"{type(error).__name__}: {error}"
            print(f"syncline run: the live picture ends here: {what}", file=sys.stderr)


def picture(states: Sequence[RankState], now: float, columns: int, lines: int) -> list[str]:
    """Return the lines of a picture of the ranks of this host.

    Args:
        states: the states of the ranks.
        now: the time, in seconds of `time.monotonic`.
        columns: the width of the terminal.
        lines: the height of the terminal.
    """
    num_ranks = max((one.process.num_ranks for one in states if one.process is not None), default=0)
    where = f" of this host ({len(states)} of {num_ranks})" if num_ranks > len(states) else ""
    text = screen(states, now, columns=columns, lines=max(6, 2 * lines // 3))
    return [f"--- the ranks{where} ".ljust(min(columns - 1, 70), "-"), *text.splitlines()]


class _Above(io.TextIOBase):
    """A stream whose lines appear above the picture."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._rest = terminal, ""

    def write(self, text: str) -> int:
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._terminal.print((whole + newline).encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return True
