"""For all tests."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import hangs

if TYPE_CHECKING:
    from forks import Forks
    from syncline.testing import RankPool

LONGEST_FIRST = (
    "test_ray.py",
    "test_plan_command.py",
    "test_lines_of_one_mistake.py",
    "test_elastic_hosts.py",
    "test_elastic.py",
    "test_sick_runs.py",
    "test_site.py",
    "test_slurm.py",
    "test_resilient.py",
    "test_packages.py",
    "test_explain_command.py",
    "test_sanitizers.py",
    "test_examples.py",
    "test_stop.py",
    "test_signals.py",
    "test_fuzz.py",
    "test_run_live.py",
    "test_torch_suite.py",
    "test_elastic_torchrun.py",
    "test_torchrun_hosts.py",
    "test_hosts.py",
    "test_shared_memory.py",
    "test_other_systems.py",
    "test_contract.py",
    "test_testing_plugin.py",
    "test_sharded.py",
    "test_doctor_command.py",
    "test_first_run.py",
    "test_run.py",
    "test_bench_command.py",
    "test_launch.py",
    "test_shared_memory_faults.py",
    "test_one_process.py",
    "test_build.py",
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

IN_EACH_CHANGE = {
    "test_elastic.py": 8,
    "test_elastic_compressed.py": 8,
    "test_elastic_drawn.py": 8,
    "test_elastic_drifting.py": 8,
    "test_elastic_hosts.py": 5,
    "test_elastic_pairs.py": 6,
    "test_elastic_sharded.py": 8,
    "test_elastic_torchrun.py": 3,
    "test_examples.py": 3,
    "test_explain_command.py": 3,
    "test_flipped_bits.py": 8,
    "test_joining.py": 4,
    "test_kills.py": 8,
    "test_lines_of_one_mistake.py": 3,
    "test_mpi.py": 0,
    "test_notebook.py": 0,
    "test_other_systems.py": 0,
    "test_packages.py": 0,
    "test_plan_command.py": 6,
    "test_ray.py": 0,
    "test_ray_resilient.py": 0,
    "test_sanitizers.py": 3,
    "test_shared_memory_faults.py": 2,
    "test_sick_runs.py": 8,
    "test_site.py": 4,
    "test_slurm.py": 5,
    "test_submitit.py": 0,
}
"""Of the slow tests in these files, each change runs one in so many; 0 means none. `make test-nightly` runs the others:
full products, and what takes long and hardly ever finds anything."""

PYTEST_VARIABLE = "PYTEST_CURRENT_TEST"
"""The environment variable that pytest itself changes during a test."""

# What tests start writes its stacks when it is ended because it hangs.
os.environ |= hangs.FAULTHANDLER
# What a shell starts in the background ignores Ctrl-C, and so does all that it starts. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A property is judged by what it finds, not by how long a busy machine takes for an example. Its examples are the same
# in each run. With HYPOTHESIS_PROFILE=nightly, they are new ones.
settings.register_profile("syncline", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "syncline"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept what pyproject.toml says of pytest-timeout where it is missing: `make test-gpu` takes any Python."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Begin each test with the same random numbers, and restore what it has changed in this process.

    So no test depends on which others have run before. This takes less than 0.2 ms.
    """
    import torch

    random.seed(0)
    # `torch.manual_seed` also looks for devices, which takes longer.
    torch.default_generator.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    folder, variables = os.getcwd(), os.environ.copy()
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    variables[PYTEST_VARIABLE] = os.environ.get(PYTEST_VARIABLE, "")
    if os.environ != variables:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
    os.chdir(folder)


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


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers = Counter[str]()
    for item in items:
        name = item.path.name
        one_in = IN_EACH_CHANGE.get(name)
        if one_in == 0:
            item.add_marker(pytest.mark.nightly)
        elif one_in is not None and item.get_closest_marker("slow"):
            if numbers[name] % one_in:
                item.add_marker(pytest.mark.nightly)
            numbers[name] += 1
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
