"""The lower end of a terminal: a picture that is drawn again and again, and lines that appear above it."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from syncline.tools.launch.display import Writer

_ERASE_BELOW = b"\r\033[J"


class Size(NamedTuple):
    """The size of a terminal."""

    columns: int
    lines: int


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
        self._lock = threading.RLock()
        """The picture is drawn by one thread, and lines are printed by others."""
        self._drawn: list[str] = []
        """The lines of the picture."""
        self._is_over = False

    @property
    def size(self) -> Size:
        """The size; 80 x 24 if the terminal does not know it."""
        try:
            found = os.get_terminal_size(self._fd)
        except OSError:  # it was closed
            return Size(80, 24)
        return Size(found.columns or 80, found.lines or 24)

    def draw(self, lines: Sequence[str]) -> None:
        """Draw a picture in the place of the last one. Lines that are too long are cut."""
        with self._lock:
            if self._is_over:
                return
            columns = self.size.columns
            erase, self._drawn = self._erase(columns), [_cut(line, columns - 1) for line in lines]
            self._writer.write(self._fd, erase + self._picture())

    def print(self, data: bytes) -> None:
        """Print complete lines above the picture."""
        with self._lock:
            self._writer.write(self._fd, self._erase(self.size.columns) + data + self._picture())

    def end(self, *, stays: bool) -> None:
        """Draw nothing more. `print` still works.

        Args:
            stays: whether the last picture stays, as lines that were printed. Otherwise it is erased.
        """
        with self._lock:
            if not stays:
                self._writer.write(self._fd, self._erase(self.size.columns))
            self._drawn, self._is_over = [], True

    def _picture(self) -> bytes:
        return "".join(f"{line}\n" for line in self._drawn).encode(errors="replace")

    def _erase(self, columns: int) -> bytes:
        if not self._drawn:
            return b""
        # If the terminal has become narrower, it has wrapped the lines of the picture.
        num_lines = sum(max(1, -(-_width(line) // columns)) for line in self._drawn)
        return b"\033[%dA" % num_lines + _ERASE_BELOW


def _width(text: str) -> int:
    return sum(_width_of(character) for character in text)


def _width_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(line: str, columns: int) -> str:
    r"""Return a line without characters that move the cursor, and as much of it as fits.

    Examples:
        >>> _cut("a\tb\x1b[2Jc", 6)
        'a?b?[2'
    """
    shown, width = "", 0
    for character in line:
        width += _width_of(character)
        if width > columns:
            break
        shown += character if character.isprintable() else "?"
    return shown
