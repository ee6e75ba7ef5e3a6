from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.sync.control import MAX_ITEMS, RankControl, decode, encode, tail_numel

controls = st.builds(
    RankControl,
    gradients_missing=st.booleans(),
    graph_changed=st.booleans(),
    num_items=st.none() | st.integers(0, MAX_ITEMS),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@given(ranks=st.lists(controls, min_size=1, max_size=9))
def test_a_sum_in_any_dtype_hands_every_fact_to_every_rank(
    dtype: torch.dtype, ranks: list[RankControl]
) -> None:
    tails = [
        torch.tensor(encode(control, rank=rank, num_ranks=len(ranks)), dtype=dtype)
        for rank, control in enumerate(ranks)
    ]
    summed = torch.stack(tails).sum(0, dtype=dtype)
    decoded, used = decode(summed.tolist(), num_ranks=len(ranks))
    assert decoded == tuple(ranks)
    assert used == ()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_parameter_counts_as_used_when_any_rank_used_it(flags: list[list[bool]]) -> None:
    num_ranks = len(flags)
    tails = [
        encode(RankControl(), rank=rank, num_ranks=num_ranks, used=[int(x) for x in row])
        for rank, row in enumerate(flags)
    ]
    summed = [sum(column) for column in zip(*tails, strict=True)]
    assert len(summed) == tail_numel(num_ranks, 3)
    _, used = decode(summed, num_ranks=num_ranks)
    assert used == tuple(sum(column) for column in zip(*flags, strict=True))


def test_a_bfloat16_sum_over_many_ranks_still_says_used() -> None:
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256, "bfloat16 stops counting here, which is why the sum is only compared with zero"
    tail = [0.0] * tail_numel(1, 0) + [float(total)]
    assert decode(tail, num_ranks=1)[1] == (256,)
