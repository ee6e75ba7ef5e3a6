"""Loss against bytes as a table, and bandwidths at which fewer bytes are worth more steps."""

from __future__ import annotations

import doctest
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.tools.bench.results import can_plot

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import loss_against_bytes
from loss_against_bytes import Pace, crossover, frontier, frontier_table, plot_frontier


def run(setting: str, loss: float, *, seed: int = 0, rate: float = 0.1, **others: Any) -> dict[str, Any]:
    told = {"setting": setting, "learning_rate": rate, "seed": seed, "loss": loss}
    return {**told, "sent_bytes": 1e6, "seconds": 2.0, **others}


def test_the_bar_is_every_step_at_its_own_best_learning_rate_at_which_it_does_not_diverge() -> None:
    runs = [run("every", 2.0, rate=0.1), run("every", 1.5, rate=0.2), run("local", 1.75, rate=0.1)]
    rows = frontier(runs, bar="every")
    assert [(row.setting, row.above) for row in rows] == [("every", 0.5), ("every", 0.0), ("local", 0.25)]
    diverged, second = frontier([run("every", math.nan), run("every", 1.5, rate=0.2)], bar="every")
    assert math.isnan(diverged.above)
    assert second.above == 0.0
    (row,) = frontier([run("local", 1.5)], bar="every")  # there is nothing to compare with
    assert math.isnan(row.above)
    assert math.isnan(row.times_fewer)
    assert "nan" in frontier_table([row], bar="every")


def test_differences_are_taken_seed_by_seed_or_else_between_means() -> None:
    # Seeds differ by far more than the settings do.
    runs = [run("every", loss, seed=seed) for seed, loss in enumerate((1.0, 2.0, 6.0))]
    runs += [run("local", loss, seed=seed) for seed, loss in enumerate((1.25, 2.25, 6.25))]
    row = frontier(runs, bar="every")[1]
    assert (row.above, row.above_spread, row.num_seeds) == (0.25, 0.0, 3)
    assert row.loss_spread == pytest.approx(math.sqrt(7))
    assert frontier([run("every", 1.0, seed=0), run("local", 1.5, seed=7)], bar="every")[1].above == 0.5


def test_accuracy_is_a_column_where_a_task_has_one() -> None:
    runs = [run("every", 1.0, accuracy=0.5), run("local", 1.5, accuracy=0.25, sent_bytes=1e5)]
    header, _, local = frontier_table(frontier(runs, bar="every"), bar="every").splitlines()
    assert "accuracy" in header
    assert local.split() == ["local", "0.1", "1.5000", "25.00%", "+0.5000", "0.10", "10.0x", "2"]


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    runs = [run("every", 1.0), run("local", 1.5, sent_bytes=1e5)]
    plot_frontier(frontier(runs, bar="every"), tmp_path / "frontier.png", bar="every")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


paces = st.builds(
    Pace,
    num_steps=st.integers(1, 10_000),
    compute_seconds=st.floats(1e-4, 10),
    link_bytes=st.floats(1, 1e9),
)


def test_the_examples() -> None:
    found = doctest.testmod(loss_against_bytes)
    assert (found.failed, found.attempted > 10) == (0, True)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ours=paces, theirs=paces)
def test_below_the_crossover_ours_is_first_and_above_it_theirs(ours: Pace, theirs: Pace) -> None:
    at = crossover(ours, theirs)
    if 1e-3 < at < 1e15:
        assert ours.seconds(at / 2) < theirs.seconds(at / 2)
        assert ours.seconds(at * 2) > theirs.seconds(at * 2)
    elif at == 0:
        assert ours.seconds(1e-6) >= theirs.seconds(1e-6)
    elif math.isinf(at):
        assert ours.seconds(1e6) <= theirs.seconds(1e6)
