from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.gradients.tail import TailForm

WIDTHS = (1, 8, 24, 49, 48, 0)

rows = st.lists(
    st.none() | st.tuples(*(st.integers(0, (1 << width) - 1) for width in WIDTHS)), min_size=1, max_size=9
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@given(rows)
def test_a_sum_in_any_dtype_hands_every_word_to_every_rank(
    dtype: torch.dtype, rows: list[tuple[int, ...] | None]
) -> None:
    form = TailForm(num_ranks=len(rows), widths=WIDTHS)
    tails = [torch.tensor(form.encode(words, rank=rank), dtype=dtype) for rank, words in enumerate(rows)]
    summed = torch.stack(tails).sum(0, dtype=dtype)
    assert len(summed) == form.numel
    decoded, used = form.decode(summed.tolist())
    assert decoded == tuple(rows)
    assert used == ()


def test_a_rank_with_nothing_to_report_sends_zeros() -> None:
    form = TailForm(num_ranks=2, widths=WIDTHS)
    assert not any(form.encode((0,) * len(WIDTHS), rank=1))
    assert any(form.encode(None, rank=1)), "a rank without inputs is known"


def test_a_word_that_is_too_large_is_refused() -> None:
    with pytest.raises(OverflowError, match="expected a rider's word of 1 bits, got the word 2"):
        TailForm(num_ranks=1, widths=(1,)).encode((2,), rank=0)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_parameter_counts_as_used_when_any_rank_used_it(flags: list[list[bool]]) -> None:
    form = TailForm(num_ranks=len(flags), widths=(1,), num_tracked=3)
    tails = [form.encode((0,), rank=rank, used=[int(x) for x in row]) for rank, row in enumerate(flags)]
    summed = [sum(column) for column in zip(*tails, strict=True)]
    assert len(summed) == form.numel
    _, used = form.decode(summed)
    assert used == tuple(sum(column) for column in zip(*flags, strict=True))


def test_a_bfloat16_sum_over_many_ranks_still_says_used() -> None:
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256, "bfloat16 stops counting here, which is why the sum is only compared with zero"
    form = TailForm(num_ranks=1, widths=(1,), num_tracked=1)
    tail = [0.0] * (form.numel - 1) + [float(total)]
    assert form.decode(tail)[1] == (256,)
