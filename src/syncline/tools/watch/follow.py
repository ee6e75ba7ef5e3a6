"""Read the rows that were added to a trace since the last call, and keep the states of the ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from syncline.regular_files import open_regular
from syncline.tools.watch.ranks import RankState, present
from syncline.tracing import rows
from syncline.tracing.file import parts_in

_FIRST_BYTES = 256 * 1024
"""The number of bytes at the end of a file that are read first: some hundred steps."""


class Follower:
    """The files of one trace, with the position up to which each was read.

    Args:
        directory: the directory of the trace.
        host: the host whose ranks are followed; None for all hosts.
    """

    def __init__(self, directory: Path, *, host: str | None = None) -> None:
        self._directory, self._host = directory, host
        self._read: dict[str, tuple[int, int]] = {}
        """For each process, the number of the last part that was read, and the position in this part."""
        self._lock = threading.Lock()
        """Protects the states: one thread starts ranks, and another one shows them."""
        self._states: dict[str, RankState] = {}
        """The states of the processes that have recorded something, by the names of their files."""
        self._started: list[RankState] = []
        """The initial states of the ranks, which count until their processes have recorded something."""
        self._replaced: set[str] = set()
        """The names of the files of processes of an earlier attempt."""

    def start(self, ranks: Sequence[int], now: float) -> None:
        """Record the ranks that are started. They replace all others."""
        with self._lock:
            self._replaced = {*parts_in(self._directory)}
            self._states = {}
            self._started = [RankState(rank, started_at=now) for rank in ranks]

    def present(self) -> list[RankState]:
        """Read the new rows, and return the present state of each rank."""
        with self._lock:
            for name, found, at in self.new_rows():
                if name not in self._replaced:
                    self._states.setdefault(name, RankState()).add(found, at)
            here = [*self._states.values()]
            if self._host is not None:
                here = [one for one in here if one.process is None or one.process.host == self._host]
            return present([*self._started, *here])

    def new_rows(self) -> Iterator[tuple[str, list[rows.Row], float]]:
        """For each process with new rows, yield its name, the rows since the last call, and the time of the change.

        The name is that of the file without its part. The time is that of the last change of the file, in seconds of
        `time.monotonic`: the system clock may be set meanwhile. A line that is still being written is left for the next
        call.
        """
        for name, parts in parts_in(self._directory).items():
            is_new = name not in self._read
            last, read = self._read.get(name, (parts[-1][0], 0))
            found, age = list[rows.Row](), 0.0
            for number, path in parts:
                if number < last:
                    continue
                try:
                    file, size = open_regular(path)
                except OSError:  # the trace has become too large, so it was deleted; or it is no regular file
                    continue
                with file:
                    start, lines = read if number == last else 0, []
                    if is_new:
                        age = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
                        if size > _FIRST_BYTES:
                            # The first row names the process.
                            lines, start = [file.readline()], size - _FIRST_BYTES
                    file.seek(start)
                    added = file.read(size - start)
                end = added.rfind(b"\n") + 1
                self._read[name] = number, start + end
                found += rows.decode([*lines, *added[:end].splitlines(keepends=True)])
            if found:
                yield name, found, time.monotonic() - age
