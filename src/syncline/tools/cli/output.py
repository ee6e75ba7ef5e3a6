"""The output of commands: messages, files, and the handling of output that cannot be printed.

Text that is printed waits in a buffer. A full disk is often noticed only when the buffer is written at the end. Without
a check there, Python would end with a message of its own, or the output would be lost and the exit code would be 0.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.tools.cli.options import UsageError

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


def write_file(path: Path, text: str, *, option: str, follows_link: bool = True) -> None:
    """Write a text to a file.

    Args:
        path: the file. A pipe needs a reader: without one, the command would wait for ever.
        text: the text.
        option: the option that names another file.
        follows_link: whether the file may be a link to another one. Pass False if the user has not named the file:
            otherwise the owner of the folder could choose which file of the user is overwritten.

    Raises:
        UsageError: the file cannot be written.
    """
    waits, no_link = getattr(os, "O_NONBLOCK", 0), 0 if follows_link else getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | waits | no_link, 0o666)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            if waits:
                os.set_blocking(fd, True)
            file.write(text)
    except OSError as error:
        reasons = {errno.ELOOP: "it is a link", errno.ENXIO: "no process reads this pipe"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise UsageError(f"cannot write {path}: {reason}: name another file with {option}") from None


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
        for stream, fd in ((self, 1), (sys.stderr, 2)):
            try:
                stream.flush()
            except (OSError, ValueError):
                with suppress(OSError, ValueError, AttributeError):
                    if stream.fileno() == fd:
                        _point_to_null(fd, os.O_WRONLY)

    def write(self, text: str) -> int:
        count: int = self._noted(self._stream.write, text)
        return count

    def flush(self) -> None:
        self._noted(self._stream.flush)

    def _noted(self, function: Callable[..., Any], *arguments: str) -> Any:
        try:
            return function(*arguments)
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
