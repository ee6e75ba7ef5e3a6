"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from forks import Forks

# A property is judged by what it finds, not by how long a busy machine takes for an example.
settings.register_profile("syncline", deadline=None)
settings.load_profile("syncline")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One process to fork others from."""
    from forks import Forks

    started = Forks()
    yield started
    started.close()
