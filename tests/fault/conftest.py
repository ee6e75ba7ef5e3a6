"""For tests in `sl.steps`, and on two hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncline.testing import SimulatedHosts
from virtual_hosts import hosts_or_skip

if TYPE_CHECKING:
    from elastic_cases import Runs

    from forks import Forks
    from syncline.testing import RankPool


@pytest.fixture
def run(rank_pool: RankPool) -> Runs:
    """Runs plans of `elastic`."""
    from elastic_cases import Runs

    return Runs(rank_pool)


@pytest.fixture
def hosts() -> Iterator[SimulatedHosts]:
    """Two hosts: network namespaces of this machine, joined by a cable of the kernel's. Needs root; skips otherwise."""
    with hosts_or_skip() as made:
        yield made


@pytest.fixture
def job_of(hosts: SimulatedHosts, tmp_path: Path, forks: Forks) -> Iterator[Callable[[type[Any]], Any]]:
    """Makes a job of a class of `elastic_hosts`, and ends what a failed test has left of it."""
    with contextlib.ExitStack() as stack:
        yield lambda kind: stack.enter_context(contextlib.closing(kind(hosts, tmp_path, forks)))
