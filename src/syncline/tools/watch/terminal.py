"""The lower end of a terminal: a picture that is drawn again and again, and lines that appear above it."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Sequence
from itertools import accumulate

from syncline.tools.launch.display import Writer

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
        """The picture is drawn by one thread, and lines are printed by others."""
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

    def keep(self) -> None:
        """Let the picture stay, as lines that were printed."""
        with self._lock:
            self._drawn = []

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
