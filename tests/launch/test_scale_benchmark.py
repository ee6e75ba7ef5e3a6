"""`benchmarks/scale.py` runs, and what it counts does not grow faster than the documentation says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import hangs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def table_of(*arguments: str, **variables: str) -> dict[str, list[float]]:
    """Run the script, and return the figures of each line of its table, without the exponent."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = hangs.run(command, timeout_seconds=600, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    _, table, _ = done.stdout.split("\n\n", 2)
    heading, sizes, *lines = table.splitlines()
    assert heading
    num_sizes = len(sizes.replace("exponent", "").split()) - 1
    cells = [line.split() for line in lines]
    table_of_names = {}
    for line in cells:
        values = line[-num_sizes - 1 : -1] if num_sizes > 1 else line[-num_sizes:]
        table_of_names[" ".join(line[: -num_sizes - (num_sizes > 1)])] = [float(value) for value in values]
    return table_of_names


def test_what_the_control_plane_of_one_rank_does_grows_with_the_number_of_ranks() -> None:
    found = table_of("--simulate", "20,200")
    few, many = found["rendezvous: store requests of all"]
    assert many <= 10.5 * few  # six for each rank, less two
    assert len(set(found["rendezvous: requests of one rank"])) == 1
    few, many = found["find deadlocks: ms, all wait for one"]
    assert few > 0
    assert many > 0


def figures_of(size: int, **variables: str) -> dict[str, float]:
    table = table_of("--ranks", str(size), "--rounds", "1", "--steps", "3", **variables)
    return {name: values[0] for name, values in table.items()}


def assert_ranks_are_frugal(size: int) -> None:
    for _ in range(3):  # a rank that waits for long asks the store again, so one of three runs counts
        found = figures_of(size)
        if found["store requests of all"] <= 24 * size:
            break
    assert found["files, rank 0"] <= found["files, rank 0, Gloo alone"] + 4
    assert found["files, most of others"] <= found["files, most of others, Gloo alone"] + 4
    # 25.5 for each of four ranks if they also exchanged the keys of their hosts
    assert found["store requests of all"] <= 24 * size


def test_four_ranks_open_hardly_more_files_than_gloo_alone() -> None:
    assert_ranks_are_frugal(4)


@pytest.mark.real
def test_64_ranks_construct_train_and_end_on_one_host() -> None:
    assert_ranks_are_frugal(64)


@pytest.mark.real
def test_with_connections_on_demand_a_rank_has_few_files() -> None:
    found = figures_of(32, TORCH_GLOO_LAZY_INIT="1")
    assert found["files, rank 0"] <= 2 * 32
    assert found["files, most of others"] <= 20 + 32 / 8
