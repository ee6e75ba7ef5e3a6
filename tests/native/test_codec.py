"""The native form of encodings: the same bits as the form in PyTorch, on every instruction set of this processor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import bits, instruction_sets, on
from selections import KINDS, values_of_kind
from support.cases import case
from syncline.compression.base import total_of
from syncline.compression.cast import narrowed
from syncline.compression.kernels import library_for
from syncline.compression.quantize import Blocks, NativeBlocks, blocks_for
from syncline.compression.topk import largest_places, selected
from syncline.native import find_library

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the native library was not built"),
    pytest.mark.usefixtures("one_thread"),
]

SPECIAL = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-126),
    *(3.4028235e38, -3.4028235e38, 1e19),
)
LARGE = 1_100_001
"""More than a thread encodes alone, and more than a selection searches without a sample."""


def drawn(numel: int, seed: int, special: float = 0.0, offset: int = 1) -> Tensor:
    """Numbers of all sizes, and some that are special, in memory that is not aligned to more than a number."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(numel + offset, generator=g)
    values *= 10.0 ** torch.randint(-3, 4, (numel + offset,), generator=g)
    pick = torch.randint(0, len(SPECIAL), (numel + offset,), generator=g)
    chosen = torch.rand(numel + offset, generator=g) < special
    return torch.where(chosen, torch.tensor(SPECIAL)[pick], values)[offset:]


# ---------------------------------------------------------------------- codes of 8, 4 or 2 bits


@settings(deadline=None, max_examples=120)
@given(
    num_bits=st.sampled_from([8, 4, 2]),
    quarter=st.sampled_from([1, 2, 3, 8, 25, 32, 256]),
    num_rows=st.integers(1, 3),
    blocks_each=st.integers(1, 4),
    missing=st.integers(0, 2000),
    special=st.sampled_from([0.0, 0.002, 0.3]),
    feedback=st.sampled_from(["none", "separate", "in place", "only lost", "lost in the values"]),
    factor=st.sampled_from([1.0, 3.0, 500.0]),
    seed=st.integers(0, 1000),
)
def test_codes_and_errors_have_the_reference_s_bits(
    num_bits: int,
    quarter: int,
    num_rows: int,
    blocks_each: int,
    missing: int,
    special: float,
    feedback: str,
    factor: float,
    seed: int,
) -> None:
    size = 4 * quarter
    row_numel = blocks_each * size
    numel = max(0, num_rows * row_numel - missing)

    def encoded(form: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        values, residual = drawn(numel, seed, special), drawn(numel, seed + 1, special / 2, offset=3)
        lost = {
            "none": None,
            "separate": torch.empty(numel),
            "in place": residual,
            "only lost": torch.empty(numel),
            "lost in the values": values,
        }[feedback]
        added = residual if feedback in ("separate", "in place") else None
        rows = form.encode(values, num_rows, row_numel, residual=added, lost=lost, factor=factor)
        return rows, lost, form.decode(rows, row_numel, torch.empty(numel))

    rows, lost, decoded = encoded(Blocks(num_bits, size))
    assert lost is None or lost.isfinite().all()
    for isa in instruction_sets():
        with on(isa):
            own_rows, own_lost, own_decoded = encoded(NativeBlocks(num_bits, size))
        assert torch.equal(own_rows, rows), isa
        assert torch.equal(bits(own_lost), bits(lost)), isa
        assert torch.equal(own_decoded.view(torch.int32), decoded.view(torch.int32)), isa


@settings(deadline=None, max_examples=80)
@given(
    num_bits=st.sampled_from([8, 4, 2]),
    quarter=st.sampled_from([1, 3, 32, 256]),
    numel=st.integers(1, 2500),
    num_ranks=st.integers(1, 5),
    own_row=st.integers(-1, 4),
    special=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 1000),
)
def test_means_have_the_reference_s_bits(
    num_bits: int, quarter: int, numel: int, num_ranks: int, own_row: int, special: float, seed: int
) -> None:
    form = Blocks(num_bits, 4 * quarter)
    values = [drawn(numel, seed + rank, special) for rank in range(num_ranks)]
    rows = torch.cat([form.encode(one, 1, numel) for one in values])
    is_own = 0 <= own_row < num_ranks
    expected = form.mean(rows, torch.empty(numel), own=(own_row, values[own_row]) if is_own else None)
    for isa in instruction_sets():
        with on(isa):
            out = values[own_row].clone() if is_own else torch.empty(numel)
            found = NativeBlocks(num_bits, 4 * quarter).mean(
                rows, out, own=(own_row, out) if is_own else None
            )
        assert torch.equal(bits(found), bits(expected)), isa


def test_threads_change_nothing() -> None:
    values, residual = drawn(3 * LARGE, 0), drawn(3 * LARGE, 1)
    for num_bits in (8, 4, 2):
        form, found = NativeBlocks(num_bits, 128), []
        for num_threads in (1, 2, 3, 100):
            with on(-1, num_threads):
                lost = residual.clone()
                rows = form.encode(values, 1, len(values), residual=lost, lost=lost)
                mean = form.mean(rows.expand(2, -1), torch.empty_like(values))
            found.append((rows, lost, mean))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), num_bits


def test_a_row_that_is_not_needed_is_left_out() -> None:
    values = drawn(300, 0)
    form = NativeBlocks(8, 100)
    lost = torch.full((300,), 7.0)
    rows = form.encode(values, 3, 100, lost=lost, unused_row=1)
    expected = Blocks(8, 100).encode(values, 3, 100)
    assert torch.equal(rows[[0, 2]], expected[[0, 2]])
    assert (lost[100:200] == 7).all()
    assert (lost[:100] != 7).all()


def test_other_tensors_take_the_form_in_pytorch() -> None:
    form, values = Blocks(8, 128), torch.zeros(256)
    assert isinstance(blocks_for(form, values, None), NativeBlocks)
    for other in (values.double(), values[::2], values.to("meta"), torch.nn.Parameter(values)):
        assert blocks_for(form, values, other) is form
        assert library_for(values, other) is None
    assert blocks_for(Blocks(8, 2048), values) == Blocks(8, 2048)


# ---------------------------------------------------------------------- 16-bit types


def test_narrow_values_have_the_reference_s_bits() -> None:
    g = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (40_000,), generator=g).to(torch.int32).view(torch.float32)
    for dtype, half in ((torch.bfloat16, 0x8000), (torch.float16, 0x1000)):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
        halfway = (every.view(torch.int32) + half).view(torch.float32)
        for values in (any_bits, every, halfway, drawn(LARGE, 1, 0.1), torch.empty(0), drawn(1, 0)):
            for divisor in (1, 2, 3, 4, 7):
                expected = (values / divisor).to(dtype)
                for isa in instruction_sets():
                    with on(isa, 3):
                        found = narrowed(values, divisor, dtype)
                    assert torch.equal(bits(found), bits(expected)), (isa, divisor, dtype)


# ---------------------------------------------------------------------- the largest magnitudes


def assert_selected(values: Tensor, residual: Tensor | None, number: int) -> None:
    lost = None if residual is None else torch.empty_like(values)
    total = total_of(values, residual, lost).clone()
    expected = largest_places(total, number)
    in_order = (total.view(torch.int32) & 0x7FFFFFFF).sort(descending=True, stable=True).indices
    assert torch.equal(expected, in_order[:number].sort().values)
    for isa in instruction_sets():
        for num_threads in (1, 3):
            with on(isa, num_threads):
                lost = None if residual is None else residual.clone()
                found = selected(values.clone(), number, residual=lost, lost=lost)
            assert torch.equal(found.places.long(), expected), (isa, num_threads)
            assert torch.equal(bits(found.values), bits(total[expected]))
            assert found.all_finite == bool(total.isfinite().all())
            assert lost is None or torch.equal(bits(lost), bits(total))


@settings(deadline=None, max_examples=80)
@given(
    numel=st.integers(1, 300),
    ratio=st.floats(0, 1),
    special=st.sampled_from([0.0, 0.1, 0.9]),
    adds=st.booleans(),
    rounds=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_reference_s_values_are_selected(
    numel: int, ratio: float, special: float, adds: bool, rounds: bool, seed: int
) -> None:
    values = drawn(numel, seed, special)
    if rounds:  # so that many magnitudes are equal
        values = values.sign() * values.abs().clamp(max=1e9).round().clamp(max=3)
    assert_selected(
        values, drawn(numel, seed + 1) if adds and not rounds else None, max(1, int(ratio * numel))
    )


def test_the_reference_s_values_are_selected_among_many() -> None:
    for kind in (*KINDS, "not finite"):
        values = values_of_kind(kind, 2 * LARGE)
        if kind == "not finite":
            values[[5, 77777]], values[[6, 99]] = math.nan, -math.inf
        for number in (1, 6_001, len(values) // 3):
            with case(kind, number):
                assert_selected(values, None, number)
