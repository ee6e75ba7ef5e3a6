"""Several faults of one job in `sl.steps`, drawn by chance. `python tests/fault/elastic_drawn.py` draws more."""

from __future__ import annotations

import elastic_drawn
import pytest

from syncline.testing import RankPool


@pytest.mark.real
@pytest.mark.parametrize("seed", range(20))
def test_every_step_and_sample_counts_once(seed: int, rank_pool: RankPool) -> None:
    elastic_drawn.run(seed, rank_pool)
