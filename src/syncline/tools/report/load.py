"""Read the files of a trace. Each process has written one file, in parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from syncline.tracing import rows
from syncline.tracing.file import SUFFIX

_PART = re.compile(r"(?P<name>rank-(?P<rank>\d+)\..+)\.(?P<part>\d+)" + re.escape(SUFFIX))


class NoTrace(Exception):
    """There is no trace in the directory, or it cannot be read. The text says what to do."""


@dataclass(kw_only=True)
class ProcessTrace:
    """What one process has recorded."""

    process: rows.ProcessRow
    found: list[rows.Row] = field(default_factory=list)
    """All other rows, in the order of their files."""
    is_cut: bool = False
    """Whether parts in the middle were deleted, because the trace had become too large."""

    @property
    def end(self) -> rows.EndRow | None:
        """The end of the process; None if it was killed or still runs."""
        last = self.found[-1] if self.found else None
        return last if isinstance(last, rows.EndRow) else None


def load(directory: Path) -> list[ProcessTrace]:
    """Return what each process has recorded, in the order of ranks and of time.

    Args:
        directory: the directory of the trace.

    Raises:
        NoTrace: there is no trace, or it was written by a newer version of Syncline.
    """
    if not directory.is_dir():
        raise NoTrace(f"there is no directory {directory}: record a run by syncline run --trace {directory}")
    found = sorted(
        (match["name"], int(match["part"]), path)
        for path in directory.iterdir()
        if (match := _PART.fullmatch(path.name))
    )
    if not found:
        raise NoTrace(
            f"{directory} has no trace: record a run by syncline run --trace {directory}, or by "
            f'sl.trace("{directory}") in the program'
        )
    processes = []
    for name, parts in itertools.groupby(found, key=lambda one: one[0]):
        one = _read_process(name, [(number, path) for _, number, path in parts])
        if one is not None:
            processes.append(one)
    if not processes:
        raise NoTrace(f"the files in {directory} are empty: the program ended before its first step")
    return sorted(processes, key=lambda one: (one.process.rank, one.process.unix_seconds))


def _read_process(name: str, parts: list[tuple[int, Path]]) -> ProcessTrace | None:
    found = None
    for _, path in parts:
        with path.open("rb") as file:
            for row in rows.decode(file):
                if isinstance(row, rows.ProcessRow):
                    if row.format > rows.FORMAT:
                        raise NoTrace(
                            f"{path} has format {row.format}, and this version of Syncline reads up to format "
                            f"{rows.FORMAT}: use the version that has recorded the trace, or a newer one"
                        )
                    found = found or ProcessTrace(process=row)
                elif found is not None:
                    found.found.append(row)
    if found is not None:
        numbers = [number for number, _ in parts]
        found.is_cut = numbers != list(range(len(numbers)))
    return found


def modules_in(processes: Iterable[ProcessTrace]) -> Iterator[rows.ModuleRow]:
    """Yield the rows that describe wrapped modules."""
    for one in processes:
        yield from (row for row in one.found if isinstance(row, rows.ModuleRow))
