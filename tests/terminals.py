"""A terminal of a test, and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
import time
from typing import Self

__all__ = ["SeenTerminal", "seen"]

_TOKEN = re.compile(r"\033\[\d*[A-Za-z]|\r|\n|[^\033\r\n]+|.", re.DOTALL)


def seen(text: str, columns: int = 10_000) -> list[str]:
    """What a terminal shows after a text was written to it, with what has scrolled out of sight. It wraps long lines.

    Raises:
        AssertionError: the text has something other than the few sequences that move the cursor or erase.
    """
    lines, row, column = [""], 0, 0
    for token in _TOKEN.findall(text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\033"):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            else:
                assert token == "\033[J", repr(token)
                lines[row] = lines[row][:column]
                del lines[row + 1 :]
        else:
            for character in token:
                if column == columns:
                    row, column = row + 1, 0
                    lines += [""] * (row + 1 - len(lines))
                lines[row] = f"{lines[row]:{column}}"[:column] + character + lines[row][column + 1 :]
                column += 1
    return lines


class SeenTerminal:
    """A terminal that is read as long as the context lasts. `name` is its device."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._ours, self.fd = os.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.name = os.ttyname(self.fd)
        self._columns = columns
        self._read = b""
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.modes = termios.tcgetattr(self.fd)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        self._thread.join(10)
        os.close(self._ours)

    def _run(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # no process has the other end any more
                return
            with self._more:
                self._read += data
                self._more.notify_all()

    def lines(self) -> list[str]:
        """What is on the screen, after all that was written so far has been read."""
        mark = f"(read up to here, {time.monotonic_ns()})"
        os.write(self.fd, mark.encode())
        self.wait_for(mark)
        with self._more:
            self._read = self._read.replace(mark.encode(), b"")
            return seen(self._read.decode(), self._columns)

    def wait_for(self, *words: str, timeout_seconds: float = 60.0) -> None:
        """Wait until all these words have been written, perhaps some of them one moment and others the next."""

        def are_there() -> bool:
            return all(word.encode() in self._read for word in words)

        with self._more:
            assert self._more.wait_for(are_there, timeout_seconds), self._read.decode()
