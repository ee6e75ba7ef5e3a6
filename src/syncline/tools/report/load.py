"""Read the files of a trace. Each process has written one file, in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from syncline.regular_files import open_regular
from syncline.tracing import rows
from syncline.tracing.file import parts_in

R = TypeVar("R")

MOST_BYTES = 128 * 1024 * 1024
"""The most bytes to read of all files together. In memory they take ten times as much."""


class NoTrace(Exception):
    """There is no trace in the directory, or it cannot be read. The text says what to do."""


@dataclass(kw_only=True)
class ProcessTrace:
    """The trace of one process."""

    process: rows.ProcessRow
    found: list[rows.Row] = field(default_factory=list)
    """All other rows, in the order of their files."""
    is_cut: bool = False
    """Whether parts in the middle were deleted, because the trace had become too large."""

    def rows_of(self, kind: type[R]) -> list[R]:
        """Return the rows of one kind."""
        return [row for row in self.found if isinstance(row, kind)]

    @property
    def end(self) -> rows.EndRow | None:
        """The end of the process; None if it was killed or still runs."""
        return next((row for row in reversed(self.found[-10:]) if isinstance(row, rows.EndRow)), None)

    def unix_seconds(self, at: int) -> float:
        """Return a time of the process in seconds since the epoch."""
        return self.process.unix_seconds + (at - self.process.at) / 1e6

    @property
    def last_at(self) -> int:
        """The time of the last row."""
        times = map(rows.time_of, reversed(self.found))
        return next((time for time in times if time is not None), self.process.at)


def load(directory: Path) -> list[ProcessTrace]:
    """Return the trace of each process, in the order of ranks and of time.

    Args:
        directory: the directory of the trace.

    Raises:
        NoTrace: there is no trace, or it was written by a newer version of Syncline.
    """
    if not directory.is_dir():
        raise NoTrace(f"there is no directory {directory}: record a run by syncline run --trace {directory}")
    found = parts_in(directory)
    if not found:
        raise NoTrace(
            f"{directory} has no trace: record a run by syncline run --trace {directory}, or by "
            f'sl.trace("{directory}") in the program'
        )
    read = [_read_process(name, parts, MOST_BYTES // len(found)) for name, parts in found.items()]
    processes = [one for one in read if one is not None]
    if not processes:
        raise NoTrace(f"the files in {directory} are empty: the program ended before its first step")
    return sorted(processes, key=lambda one: (one.process.rank, one.process.unix_seconds))


def _read_process(name: str, parts: list[tuple[int, Path]], most_bytes: int) -> ProcessTrace | None:
    """Read the file of one process. Of a long one, read the beginning and the end.

    Args:
        name: the name of the file.
        parts: the numbers and paths of its parts.
        most_bytes: the most bytes to read.
    """
    sizes = {path: _size_of(path) for _, path in parts}
    is_cut = [number for number, _ in parts] != list(range(len(parts)))
    if sum(sizes.values()) <= most_bytes:
        places = [(path, 0, size) for path, size in sizes.items()]
    else:
        is_cut = True
        backwards = _limited(reversed(sizes.items()), most_bytes // 2)
        places = [
            *((path, 0, size) for path, size in _limited(sizes.items(), most_bytes // 2)),
            *((path, sizes[path] - size, size) for path, size in reversed(backwards)),
        ]
    found = None
    for path, start, size in places:
        for row in rows.decode(_lines(path, start, size)):
            if isinstance(row, rows.ProcessRow):
                if row.format > rows.FORMAT:
                    raise NoTrace(
                        f"{name} has format {row.format}, and this version of Syncline reads up to format "
                        f"{rows.FORMAT}: use the version that has recorded the trace, or a newer one"
                    )
                found = found or ProcessTrace(process=row, is_cut=is_cut)
            if found is not None:
                found.found.append(row)
    return found


def _limited(files: Iterable[tuple[Path, int]], most_bytes: int) -> list[tuple[Path, int]]:
    """Return the number of bytes to read of each file, so that the total is at most `most_bytes`."""
    found = []
    for path, size in files:
        size = min(size, most_bytes)
        most_bytes -= size
        if size:
            found.append((path, size))
    return found


def _size_of(path: Path) -> int:
    """Return the size of a file; 0 if it is no regular file, or cannot be read."""
    try:
        file, size = open_regular(path)
    except OSError:
        return 0
    file.close()
    return size


def _lines(path: Path, start: int, size: int) -> Iterator[bytes]:
    # The program may delete a part meanwhile.
    with contextlib.suppress(OSError), open_regular(path)[0] as file:
        file.seek(start)
        yield from file.read(size).splitlines()
