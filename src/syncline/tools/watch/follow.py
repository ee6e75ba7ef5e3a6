"""Reads what has been added to the files of a trace since the last look."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from syncline.regular_files import open_regular
from syncline.tracing import rows
from syncline.tracing.file import parts_in

_FIRST_BYTES = 256 * 1024
"""How much of the end of a file is read at the first look: some hundred steps."""


class Follower:
    """The files of one trace, and how far each has been read.

    Args:
        directory: the directory of the trace.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, tuple[int, int]] = {}
        """For each process the number of its last part that was read, and how far."""

    def new_rows(self) -> Iterator[tuple[str, list[rows.Row], float]]:
        """Yield for each process that has recorded something since the last call its name, the new rows, and when.

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
                except (
                    OSError
                ):  # deleted meanwhile, because the trace has become too large; or it is no regular file
                    continue
                with file:
                    start, lines = read if number == last else 0, []
                    if is_new:
                        age = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
                        if size > _FIRST_BYTES:
                            lines, start = (
                                [file.readline()],
                                size - _FIRST_BYTES,
                            )  # the first row names the process
                    file.seek(start)
                    added = file.read(size - start)
                end = added.rfind(b"\n") + 1
                self._read[name] = number, start + end
                found += rows.decode([*lines, *added[:end].splitlines(keepends=True)])
            if found:
                yield name, found, time.monotonic() - age
