"""`sl.trace`: record what happens in each step of this process, for `syncline report`."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from types import TracebackType

from syncline import environment
from syncline.checks import checked_number, checked_path, suggests_arguments
from syncline.session.ending import uncaught_exception
from syncline.tracing.recorder import Recorder
from syncline.words import one_line

BYTES_PER_MB = 1024 * 1024


class Trace:
    """A running trace of this process. `sl.trace` returns it. It is a context manager, which stops at its end."""

    def __init__(
        self, directory: Path, max_bytes: int, *, rank: int | None = None, num_ranks: int = 1
    ) -> None:
        self.directory = directory
        self._recorder = Recorder(directory, max_bytes)
        if not environment.is_explained():
            self._recorder.start()
            if rank is not None:
                self._recorder.begin(rank, num_ranks)
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return one_line(self, str(self.directory))

    def stop(self) -> None:
        """Stop recording. Stopping again does nothing."""
        self._end(None)

    def _at_exit(self) -> None:
        self._end(uncaught_exception())

    def _end(self, error: BaseException | None) -> None:
        atexit.unregister(self._at_exit)
        self._recorder.end(error)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end(error)


@suggests_arguments
def trace(directory: str | os.PathLike[str], *, max_mb: float = 64.0) -> Trace:
    """Record the steps of this process in a directory, until the process ends or the result's `stop` is called.

    Call it on all ranks, before the first step, with the same directory. `syncline run --trace DIRECTORY` does it for a
    program that you do not want to change. `syncline report DIRECTORY` then shows where the time of a step goes, and
    which rank and which bucket the others wait for.

    Each rank writes files of its own, and sends nothing. If the process is killed, all but its last 50 ms can be read.
    A step costs 0.06 to 0.09 ms. If several hosts take part, the directory must be on a file system that they share, or
    you copy the files of all hosts into one directory.

    Args:
        directory: the directory. It is created. Use one directory for each run.
        max_mb: the largest size of the files of one rank, in MiB. If they grow larger, the middle of the run is
            deleted: its beginning and its end stay.

    Raises:
        TypeError, ValueError: `directory` is not a path, or `max_mb` is not a number above 0.

    Examples:
        >>> import tempfile, torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> directory = tempfile.mkdtemp()
        >>> with sl.trace(directory):
        ...     ddp(torch.ones(1, 2)).sum().backward()
    """
    path = checked_path("directory", directory)
    if not path:
        raise ValueError("expected directory to be a path, got ''")
    return Trace(Path(path), int(BYTES_PER_MB * checked_number("max_mb", max_mb, above=0)))
