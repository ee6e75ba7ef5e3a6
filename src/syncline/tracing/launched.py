"""Start a trace in a rank of `syncline run --trace DIR` or `--live`, before the program (`tools/launch/worker.py`)."""

from __future__ import annotations

from pathlib import Path

from syncline import environment
from syncline.launchers import current
from syncline.tracing.trace import BYTES_PER_MB, Trace


def argument(directory: Path, max_mb: float) -> str:
    """Return the argument with which the launcher has `main` called in each rank."""
    return f"{max_mb:g} {directory}"


def main(text: str) -> None:
    """Trace this process until it ends."""
    max_mb, _, directory = text.partition(" ")
    place = current()
    # A process that joins ranks that train gets its number from them.
    rank = None if environment.joins_running_job() else place.rank
    Trace(Path(directory), int(float(max_mb) * BYTES_PER_MB), rank=rank, num_ranks=place.size)
