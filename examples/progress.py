"""Progress of the examples while they train: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

import syncline as sl


class Progress:
    """A progress bar and the lines above it. Ranks that do not show it print nothing.

    Args:
        num_steps: how often `advance` will be called.
        shown: whether this rank prints.
    """

    def __init__(self, num_steps: int, *, shown: bool) -> None:
        self._shown = shown
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            transient=True,
            disable=not (shown and sys.stdout.isatty()),
        )
        self._task = self._bar.add_task("", total=num_steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, status: str, by: int = 1) -> None:
        """Advance the bar by `by` steps, and show `status` beside it."""
        self._bar.update(self._task, advance=by, description=status)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)


def synchronized(statistics: sl.Statistics, seconds: float) -> str:
    """Return a small table of what was sent, and how long this rank waited for it."""
    share = statistics.waited_seconds / seconds
    lines = ["Synchronized by rank 0:"]
    for operation, num_calls in sorted(statistics.num_calls.items()):
        megabytes = statistics.payload_bytes.get(operation, 0) / 1e6
        lines.append(f"  {operation:<14} {num_calls:>6,} calls {megabytes:>12,.3f} MB")
    lines.append(f"  waited {statistics.waited_seconds:.1f} s of {seconds:.1f} s ({share:.0%}) for it")
    return "\n".join(lines)
