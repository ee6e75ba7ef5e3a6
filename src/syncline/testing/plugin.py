"""The pytest plugin: `@pytest.mark.ranks(n)` runs a test on n rank processes."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n, timeout=60): run the test on n rank processes")
