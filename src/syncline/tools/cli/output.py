"""What commands print: messages about progress, and what happens if something cannot be printed.

Text that is printed waits in a buffer. A full disk is often noticed only when the buffer is written at the end. Without
a check there, Python would end with a message of its own, or the output would be lost and the exit code would be 0.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

EXIT_BROKEN_PIPE = 141
"""The exit code if the reader of the output has left, as `| head` does: that of a process that SIGPIPE has ended."""


def say(command: str, text: str) -> None:
    """Print a message on stderr. A stderr that cannot be written stops no command.

    Args:
        command: the name of the command, such as "syncline doctor"; empty for no name.
        text: the message.
    """
    with suppress(OSError, ValueError):
        print(f"{command}: {text}" if command else text, file=sys.stderr, flush=True)


@contextmanager
def in_progress(command: str, text: str) -> Iterator[None]:
    """Show on stderr what a command does inside of the `with` block.

    On a terminal, this is one line that disappears at the end of the block. Elsewhere it is an ordinary line.

    Args:
        command: the name of the command, such as "syncline doctor".
        text: what the command does, as in "connecting two ranks".
    """
    is_terminal = sys.stderr.isatty()
    line = f"{command}: {text} ..."
    with suppress(OSError, ValueError):
        print(line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # to the first column, and erase the line


# ---------------------------------------------------------------------- output that is lost


class Output:
    """The stdout of a command. It notes if something could not be written.

    It is a context manager, in which it is `sys.stdout`. Every text can be written: what the encoding lacks is escaped.

    Python has None for a stream that was closed (`>&-`): what is printed there would disappear without an error, and
    the next file that is opened would get its number. Here, a closed stdout fails as a full disk does.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        """The first error."""

    def __enter__(self) -> Output:
        for fd, name, flags in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
            if getattr(sys, name) is None:
                _point_to_null(fd, flags)
                setattr(sys, name, os.fdopen(fd, "w", encoding="utf-8", closefd=False))
        self._stream = sys.stdout
        if isinstance(self._stream, io.TextIOWrapper) and self._stream.errors == "strict":
            self._stream.reconfigure(errors="backslashreplace")
        sys.stdout = self
        return self

    def __exit__(self, *_: object) -> None:
        """Write what was printed. What cannot be written is thrown away: Python would try it again at its end."""
        sys.stdout = self._stream
        with suppress(OSError, ValueError):
            self.flush()
        with suppress(OSError, ValueError, AttributeError):
            if self.failure is not None and self._stream.fileno() == 1:
                _point_to_null(1, os.O_WRONLY)
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _point_to_null(2, os.O_WRONLY)

    def write(self, text: str) -> int:
        with self._noted():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._noted():
            self._stream.flush()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _point_to_null(fd: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)
