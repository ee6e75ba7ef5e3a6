"""Reads what has been added to the files of a trace since the last look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from syncline.regular_files import open_regular
from syncline.tracing import rows
from syncline.tracing.file import parts_in

_FIRST_BYTES = 256 * 1024
"""How much of the end of a long file is read at the first look."""


_MAX_BYTES = 64 * 1024 * 1024
"""How much is read at a later look. No program writes more between two looks."""


class Follower:
    """The files of one trace, and how far each has been read.

    Args:
        directory: the directory of the trace.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new_rows(self) -> Iterator[tuple[str, list[rows.Row], float]]:
        """Yield for each process that has recorded something since the last call its name, the new rows, and when.

        The name is that of the file without its part. The time is that of the last change of the file, in seconds of
        `time.monotonic`: the system clock may be set meanwhile. A line that is still being written is left for the next
        call.
        """
        for name, parts in parts_in(self._directory).items():
            paths = [path for _, path in parts]
            known = [at for at, path in enumerate(paths) if path in self._read]
            found: list[rows.Row] = []
            for path in paths[known[-1] :] if known else paths[-1:]:
                found += self._added(path)
            if found:
                age = 0.0 if known else max(0.0, time.time() - _changed_at(paths[-1]))
                yield name, found, time.monotonic() - age

    def _added(self, path: Path) -> list[rows.Row]:
        try:
            file, size = open_regular(path)
        except OSError:  # deleted meanwhile, because the trace has become too large; or it is no regular file
            return []
        with file:
            start = self._read.get(path, 0)
            lines = []
            if path not in self._read and size > 2 * _FIRST_BYTES:
                lines = file.read(_FIRST_BYTES).splitlines(keepends=True)[:-1]  # which process this is
                start = size - _FIRST_BYTES
            start = max(start, size - _MAX_BYTES)
            file.seek(start)
            added = file.read(max(0, size - start))
        end = added.rfind(b"\n") + 1
        self._read[path] = start + end
        return list(rows.decode([*lines, *added[:end].splitlines(keepends=True)]))


def _changed_at(path: Path) -> float:
    """Return when a file was changed, in seconds since the epoch; now, if it was deleted meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
