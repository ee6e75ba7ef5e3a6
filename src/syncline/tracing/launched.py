"""Start a trace in a rank of `syncline run --trace DIR`, before the program starts (`tools/launch/worker.py`)."""

from __future__ import annotations

from syncline.tracing.trace import trace


def main(directory: str) -> None:
    """Trace this process until it ends."""
    trace(directory)
