from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.gradients.tail import MAX_ITEMS, MAX_REPLICA_FINGERPRINT, ControlForm, RankControl

controls = st.builds(
    RankControl,
    gradients_missing=st.booleans(),
    graph_changed=st.booleans(),
    num_items=st.none() | st.integers(0, MAX_ITEMS),
    nonfinite=st.booleans(),
    stop=st.booleans(),
    replica=st.integers(0, MAX_REPLICA_FINGERPRINT),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@given(ranks=st.lists(controls, min_size=1, max_size=9))
def test_a_sum_in_any_dtype_hands_every_fact_to_every_rank(
    dtype: torch.dtype, ranks: list[RankControl]
) -> None:
    form = ControlForm(num_ranks=len(ranks), has_replicas=True)
    tails = [torch.tensor(form.encode(control, rank=rank), dtype=dtype) for rank, control in enumerate(ranks)]
    summed = torch.stack(tails).sum(0, dtype=dtype)
    decoded, used = form.decode(summed.tolist())
    assert decoded == tuple(ranks)
    assert used == ()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_parameter_counts_as_used_when_any_rank_used_it(flags: list[list[bool]]) -> None:
    form = ControlForm(num_ranks=len(flags), num_tracked=3)
    tails = [
        form.encode(RankControl(), rank=rank, used=[int(x) for x in row]) for rank, row in enumerate(flags)
    ]
    summed = [sum(column) for column in zip(*tails, strict=True)]
    assert len(summed) == form.numel
    _, used = form.decode(summed)
    assert used == tuple(sum(column) for column in zip(*flags, strict=True))


def test_a_bfloat16_sum_over_many_ranks_still_says_used() -> None:
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256, "bfloat16 stops counting here, which is why the sum is only compared with zero"
    form = ControlForm(num_ranks=1, num_tracked=1)
    tail = [0.0] * (form.numel - 1) + [float(total)]
    assert form.decode(tail)[1] == (256,)
