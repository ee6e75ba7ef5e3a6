"""Every survivor of a kill over Gloo names the lost rank; 40 of them are a command, see `kills.py`."""

from __future__ import annotations

import pytest
from kills import kill_ranks

from syncline.testing import RankPool


@pytest.mark.real
def test_the_lost_rank_is_named_by_all_survivors(rank_pool: RankPool) -> None:
    num_named, num_survivors = kill_ranks(num_kills=6, seed=11, pool=rank_pool)
    assert num_named == num_survivors > 12  # some of three ranks, some of four
