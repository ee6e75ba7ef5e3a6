"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from forks import Forks
    from syncline.testing import RankPool

LONGEST_FIRST = (
    "test_ray.py",
    "test_site.py",
    "test_fuzz.py",
    "test_shared_memory.py",
    "test_torch_suite.py",
    "test_slurm.py",
    "test_elastic_hosts.py",
    "test_elastic.py",
    "test_other_systems.py",
    "test_sanitizers.py",
    "test_examples.py",
    "test_contract.py",
    "test_testing_plugin.py",
    "test_sharded.py",
    "test_doctor_command.py",
    "test_hosts.py",
    "test_elastic_torchrun.py",
    "test_packages.py",
    "test_first_run.py",
    "test_run.py",
    "test_bench_command.py",
    "test_launch.py",
    "test_shared_memory_faults.py",
    "test_stop.py",
    "test_one_process.py",
    "test_build.py",
    "test_torchrun_hosts.py",
    "test_compression_processes.py",
    "test_loud_failures.py",
    "test_strategy_benchmarks.py",
    "test_imports.py",
    "test_resume.py",
    "test_protocol_model.py",
    "test_flipped_bits.py",
)
"""Files that take long, the longest first: `make test` gives whole files to two processes, of which none is to begin
a long one when the other has ended."""

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


@pytest.fixture
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """The ranks of `@pytest.mark.ranks`, for a test that starts several jobs."""
    from syncline.testing.plugin import _pool_of

    return _pool_of(pytestconfig)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
