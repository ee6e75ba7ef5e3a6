"""The native form of thin factors: on every instruction set, and against the form in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import bits, instruction_sets, on
from support.cases import case
from syncline.compression.power_sgd import Factors, NativeFactors
from syncline.native import find_library

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the native library was not built"),
    pytest.mark.usefixtures("one_thread"),
]

SPECIAL = (math.inf, -math.inf, math.nan, 1e-45, 3.4028235e38, -0.0)

shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 70)), min_size=1, max_size=4)


def drawn(numel: int, seed: int, special: float = 0.0) -> Tensor:
    """Numbers, and some that are special, in memory that is not aligned to more than a number."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(numel + 1, generator=g)
    pick = torch.randint(0, len(SPECIAL), (numel + 1,), generator=g)
    chosen = torch.rand(numel + 1, generator=g) < special
    return torch.where(chosen, torch.tensor(SPECIAL)[pick], values)[1:]


def results(form: Factors, seed: int, special: float, feedback: str) -> dict[str, Tensor]:
    """What each function gives for the same arguments. Factors from other ranks do not depend on the form."""
    numel = sum((n or 1) * m for n, m in form.shapes)
    values, starts = drawn(numel, seed, special), drawn(form.right_numel, seed + 1)
    residual = drawn(numel, seed + 2, special)
    lost = {"none": None, "in place": residual, "other memory": torch.full((numel,), 7.0)}[feedback]
    message = form.left(values, starts, residual=None if lost is None else residual, lost=lost)
    total = values if lost is None else lost
    kept, out = total.clone(), torch.full((numel,), 7.0)
    means = drawn(message.numel(), seed + 3, special / 4)
    rights = form.right(total, means, out)
    lefts, right_means = means[: form.left_numel], drawn(form.right_numel, seed + 4, special)
    form.subtract(total, lefts, drawn(form.right_numel, seed + 5))
    form.mean(lefts, right_means, starts, out)
    return {
        "message": message,
        "total": kept,
        "orthonormal rows": means,
        "rights": rights,
        "error": total.clone(),
        "mean": out,
        "starts": starts,
    }


EQUAL = ("total", "orthonormal rows", "mean", "starts")
"""The results that have the bits of the form in PyTorch. The others are sums whose order is free."""


@settings(deadline=None, max_examples=100)
@given(
    rank=st.integers(1, 5),
    shapes=shapes,
    special=st.sampled_from([0.0, 0.01]),
    feedback=st.sampled_from(["none", "in place", "other memory"]),
    seed=st.integers(0, 1000),
)
def test_both_forms_agree(
    rank: int, shapes: list[tuple[int, int]], special: float, feedback: str, seed: int
) -> None:
    expected = results(Factors(rank, shapes), seed, special, feedback)
    first: dict[str, Tensor] | None = None
    for isa in instruction_sets():
        with on(isa):
            found = results(NativeFactors(rank, shapes), seed, special, feedback)
        for name in EQUAL:
            assert torch.equal(bits(found[name]), bits(expected[name])), (isa, name)
        if not special:  # within 70 products of numbers of about 1, each rounded to 24 bits
            for name in found:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-4)
        first = first or found
        for name, tensor in found.items():
            assert torch.equal(bits(tensor), bits(first[name])), (isa, name)
        assert found["error"].isfinite().all() or feedback == "none"


def test_long_rows_long_columns_and_threads_change_nothing() -> None:
    for shapes in ([(2000, 1100), (0, 9), (1, 700)], [(2, 1_100_003)], [(1_100_001, 2)]):
        torch_form = results(Factors(2, shapes), 0, 0.0, "in place")
        found = []
        for num_threads in (1, 2, 5):
            with on(-1, num_threads):
                found.append(results(NativeFactors(2, shapes), 0, 0.0, "in place"))
        for name, tensor in found[0].items():
            with case(shapes, name):
                assert all(torch.equal(bits(tensor), bits(other[name])) for other in found)
                if name in EQUAL:
                    assert torch.equal(bits(tensor), bits(torch_form[name]))
                else:
                    torch.testing.assert_close(tensor, torch_form[name], rtol=1e-4, atol=2e-2)
