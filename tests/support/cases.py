"""Tables of cases in one test: what fails says in which case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["case"]


@contextlib.contextmanager
def case(*values: object) -> Iterator[None]:
    """Add the values to what is raised inside of the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, values))}")
        raise
