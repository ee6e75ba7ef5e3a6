"""Messages on stderr that show what a command does, while it prints nothing else for seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_progress(command: str, text: str) -> Iterator[None]:
    """Show on stderr what a command does inside of the `with` block.

    On a terminal, this is one line that disappears at the end of the block. Elsewhere it is an ordinary line.

    Args:
        command: the name of the command, such as "syncline doctor".
        text: what the command does, as in "connecting two ranks".
    """
    is_terminal = sys.stderr.isatty()
    line = f"{command}: {text} ..."
    print(line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # to the first column, and erase the line
