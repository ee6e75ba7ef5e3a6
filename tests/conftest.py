"""For all tests."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import hangs

if TYPE_CHECKING:
    from forks import Forks
    from syncline.testing import RankPool

TIERS = {
    "architecture": "real",
    "docs/test_first_run.py": "real",
    "docs/test_site.py": "real",
    "elsewhere": "real",
    "fault": "real",
    "fault/test_freed_wrappers.py": "timing",
    "frameworks": "real",
    "fuzz/test_fuzz.py": "real",
    "gpu": "real",
    "launch": "real",
    "launch/test_bench_command.py": "timing",
    "launch/test_first_failure.py": "first",
    "launch/test_plan_command.py": "timing",
    "launch/test_scale_benchmark.py": "timing",
    "launch/test_sick_runs.py": "timing",
    "launch/test_strategy_benchmarks.py": "timing",
    "native/test_sanitizers.py": "real",
    "torch_suite": "real",
    "transport/test_backend.py": "real",
    "transport/test_connecting.py": "real",
    "transport/test_gloo.py": "real",
    "transport/test_hierarchy.py": "real",
    "transport/test_notices.py": "real",
    "transport/test_selection_of_hosts.py": "real",
    "transport/test_shared_memory.py": "real",
    "unit/test_at_exit.py": "real",
    "unit/test_bench_comparison.py": "real",
    "unit/test_build.py": "real",
    "unit/test_datasets.py": "real",
    "unit/test_gate.py": "real",
    "unit/test_hangs.py": "real",
    "unit/test_many_tensors.py": "timing",
    "unit/test_peers.py": "real",
    "unit/test_processes.py": "real",
    "unit/test_store_requests.py": "real",
    "unit/test_testing_plugin.py": "real",
}
"""The tier of each folder and file that is not in the first one; a file goes before its folder. A test of a file in
the first tier may be `@pytest.mark.real`. docs/inside/tests.md says what belongs where."""

ONE_IN = {
    "test_elastic.py": 1,  # a table of pairs
    "test_elastic_hosts.py": 5,
    "test_elastic_torchrun.py": 3,
    "test_endings.py": 3,
    "test_examples.py": 3,
    "test_first_run.py": 1,
    "test_mpi.py": 0,
    "test_notebook.py": 0,
    "test_other_systems.py": 0,
    "test_packages.py": 0,
    "test_ray.py": 0,
    "test_ray_resilient.py": 0,
    "test_sanitizers.py": 3,
    "test_site.py": 4,
    "test_slurm.py": 5,
    "test_submitit.py": 0,
}
"""Of the real tests of a file, each change runs one in so many, and the next change the next ones; 0 means none. Files
that are not named here: one in two. `make test-nightly` runs all: full products, and what takes long."""

TURN_VARIABLE = "SYNCLINE_TEST_TURN"
"""The environment variable that says which ones it runs: the number of commits, so that one commit runs the same."""

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of the files that take long, as the last `make test-nightly` measured them: the longest runs first. `make`
gives whole files to two processes, of which none is to begin a long one when the other has ended."""

PYTEST_VARIABLE = "PYTEST_CURRENT_TEST"
"""The environment variable that pytest itself changes during a test."""

# What an error says must not depend on how late a busy machine delivers the evidence. Processes of tests read this.
os.environ.setdefault("SYNCLINE_PATIENCE", "3")
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
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} anew")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the process to which the workers report."""
    if config.getoption("write_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


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
    turn = int(os.environ.setdefault(TURN_VARIABLE, num_commits()))
    for item in items:
        if (tier := tier_of(file_of(item.nodeid))) != "first":
            item.add_marker(tier)
        if item.get_closest_marker("real"):
            one_in = ONE_IN.get(item.path.name, 2)
            # By the name, so that it does not depend on which tests are collected: one that failed runs again, alone.
            if one_in == 0 or (zlib.crc32(item.nodeid.encode()) + turn) % one_in:
                item.add_marker(pytest.mark.nightly)
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def num_commits() -> str:
    """Return the number of commits of the project; "0" where it has no history."""
    if shutil.which("git") is None:
        return "0"
    counting = ["git", "rev-list", "--count", "HEAD"]
    return (
        subprocess.run(counting, cwd=DURATIONS.parent, capture_output=True, text=True).stdout.strip() or "0"
    )


def file_of(test: str) -> str:
    """Return the path of a test's file, from tests on."""
    return test.partition("::")[0].removeprefix("tests/")


def tier_of(file: str) -> str:
    """Return "first", "real" or "timing": the tier of a file, whose path is from tests on."""
    return TIERS.get(file) or TIERS.get(file.partition("/")[0], "first")


class Stopwatch:
    """Adds up the seconds of each file, and writes them down at the end."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) | {
            file: round(seconds) for file, seconds in self.seconds.items()
        }
        there = {file: seconds for file, seconds in known.items() if (DURATIONS.parent / file).exists()}
        longest = sorted((-seconds, file) for file, seconds in there.items() if seconds >= 2)
        DURATIONS.write_text(json.dumps({file: -seconds for seconds, file in longest}, indent=2) + "\n")
