from __future__ import annotations

from collections.abc import Iterator

import pytest
from forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One process to fork ranks from, for all tests that need one."""
    started = Forks()
    yield started
    started.close()
