"""Launchers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launcher_server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
