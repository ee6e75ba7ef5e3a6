"""Displays of the ranks' output: unchanged, or above a picture of the states of the ranks."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

EXIT_OUTPUT_LOST = 74
"""The exit code if output could not be written, for example to a full disk. It is EX_IOERR of sysexits.h."""


class Writer:
    """A writer to file descriptors. If the reader of one has closed it, as `| head` does, its bytes are dropped.

    The job then continues without this output. It also continues if a disk is full, but then its exit code is not 0.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        """The first error other than a broken pipe."""
        self._closed_fds: set[int] = set()

    def write(self, fd: int, data: bytes) -> None:
        """Write all of `data` to `fd`."""
        left = memoryview(data)
        while left and fd not in self._closed_fds:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                select.select([], [fd], [])
            except OSError as error:
                self._closed_fds.add(fd)
                if not isinstance(error, BrokenPipeError):
                    self.failure = self.failure or error


class Display:
    """A display that shows the output of the ranks, and nothing else. `syncline run --live` has another one."""

    only_rank_0 = False
    """Whether only the lines of rank 0 appear. If another rank fails, its error is printed at the end."""

    owns_terminal = False
    """Whether rank 0 never writes to a terminal directly, as it usually does."""

    def __init__(self) -> None:
        self.writer = Writer()
        """The writer of the output, and of the files in which it is kept."""

    def show(self, fd: int, data: bytes) -> None:
        """Print complete lines to a file descriptor, which is 1 or 2."""
        self.writer.write(fd, data)

    def start_ranks(self, ranks: Sequence[int]) -> None:
        """Record the ranks that are started on this host now. They replace all ranks of a former attempt."""

    def end(self) -> None:
        """Stop showing anything but the output. Call this when the ranks have ended."""


class DisplayOfRank0(Display):
    """A display that shows the output of rank 0 only, and never lets it write to a terminal directly."""

    only_rank_0 = owns_terminal = True
