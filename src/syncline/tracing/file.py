"""The file of one rank, to which rows are appended. They are in the file when `write` returns.

A line is written by one system call and is kept nowhere else. So nothing of it is lost if the process is killed, and
the memory of the process stays the same however long it trains. The size on disk is bounded, too: a file consists of
parts, and when they become too large together, the oldest part but the first is deleted. So a trace shows the beginning
of a run and its end.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

from syncline.tracing.rows import Row, encode

NUM_PARTS = 8

SUFFIX = ".trace.jsonl"
"""The end of the names of all trace files."""


_PART = re.compile(r"(rank-\d+\..+)\.(\d+)" + re.escape(SUFFIX))


def parts_in(directory: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return the files of a trace by name, each with the numbers and paths of its parts, in order."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in directory.glob(f"rank-*{SUFFIX}"):
        if match := _PART.fullmatch(path.name):
            found.setdefault(match[1], []).append((int(match[2]), path))
    return {name: sorted(parts) for name, parts in sorted(found.items())}


class TraceFile:
    """The file of one rank. Its users hold a lock: it is written by one thread at a time.

    Args:
        directory: the directory of the trace. It is created if it does not exist.
        name: the name of the file, which no other process uses. If it exists, a number is added.
        max_bytes: the size of all parts together.

    Raises:
        OSError: a line could not be written. Also raised by `write`.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        self._directory, self._name = directory, name
        self._part_bytes = max(1, max_bytes // NUM_PARTS)
        self._parts: deque[Path] = deque()
        """The parts that can be deleted: all but the first and the present one."""
        self._number = 0
        self._descriptor = -1
        self._num_bytes = 0
        self._repeated: dict[str, bytes] = {}
        self._pid = os.getpid()
        directory.mkdir(parents=True, exist_ok=True)
        again = 1
        while self._path().exists():  # a former trace of this process
            again += 1
            self._name = f"{name}-{again}"
        self._open()

    def _path(self) -> Path:
        return self._directory / f"{self._name}.{self._number:06d}{SUFFIX}"

    def _open(self) -> None:
        self._descriptor = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_bytes = 0

    def write(self, *found: Row, repeat_as: str = "") -> None:
        """Append rows, as one line.

        Args:
            found: the rows.
            repeat_as: a key, if the rows are needed to read later ones. Each part begins with the last rows of each
                key.
        """
        self.write_line(encode(*found), repeat_as)

    def write_line(self, line: bytes, repeat_as: str = "") -> None:
        """Append a line of rows; see `write`."""
        if os.getpid() != self._pid:
            return  # a fork, such as a worker of a DataLoader
        if self._descriptor < 0:
            return
        if repeat_as:
            self._repeated[repeat_as] = line
        if self._num_bytes + len(line) > self._part_bytes and self._num_bytes:
            self._next_part()
        self._append(line)

    def _next_part(self) -> None:
        self.close()  # if the next part cannot be opened, nothing more is written
        if self._number:
            self._parts.append(self._path())
        while len(self._parts) > NUM_PARTS - 2:
            self._parts.popleft().unlink(missing_ok=True)
        self._number += 1
        self._open()
        for line in self._repeated.values():
            self._append(line)

    def _append(self, line: bytes) -> None:
        os.write(self._descriptor, line)
        self._num_bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        former, self._descriptor = self._descriptor, -1
        if former >= 0:
            os.close(former)
