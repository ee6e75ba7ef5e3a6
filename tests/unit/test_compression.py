"""Encodings by their properties and against plain references; ranks are generators in one thread, nothing is sent."""

from __future__ import annotations

import math
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from encodings_in_one_thread import averagers, mean_of_ranks, residual
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selections import KINDS, values_of_kind
from support.cases import case
from syncline.compression import After, Cast, Chain, Compression, PowerSGD, Quantize, TopK, kernels, power_sgd
from syncline.compression.base import Averaged
from syncline.compression.power_sgd import orthonormal_rows, sum_of_outer_products
from syncline.compression.topk import largest_places
from syncline.native import Library

# Of these nothing is lost for ever. (What a sum in bfloat16 rounds is nobody's to feed back.)
FED_BACK = [
    Quantize(8, block_numel=16),
    Quantize(4, block_numel=6),
    Quantize(2, block_numel=8),
    TopK(0.1),
    PowerSGD(2),
    Chain(TopK(0.2), Quantize(4, block_numel=8)),
    Chain(TopK(0.2), Cast()),
    Chain(PowerSGD(1), Quantize(8, block_numel=4)),
    Chain(PowerSGD(2), TopK(0.5), Quantize(8, block_numel=8)),
    After(2, PowerSGD(2), before=Quantize(4, block_numel=6)),
    After(2, Chain(TopK(0.2), Quantize(4, block_numel=8))),
    After(1, Quantize(8, block_numel=16), before=PowerSGD(2)),
]

ALL = [
    *FED_BACK,
    Cast(),
    Cast(torch.float16),
    Chain(PowerSGD(2), Cast()),
    Quantize(8, error_feedback=False),
    Quantize(4, error_feedback=False),
    Quantize(2, error_feedback=False),
    TopK(0.3, error_feedback=False),
    PowerSGD(1, error_feedback=False),
]

shapes_of_tensors = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


SHAPES = [(12, 10), (20,)]


def drawn(shapes: Any, num_ranks: int, seed: int, scale: float = 1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    numel = sum(math.prod(shape) for shape in shapes)
    return [scale * torch.randn(numel, generator=g) for _ in range(num_ranks)]


# ---------------------------------------------------------------------- properties of all


@settings(max_examples=60)
@given(
    compression=st.sampled_from(FED_BACK),
    shapes=shapes_of_tensors,
    num_ranks=st.integers(1, 5),
    num_rounds=st.integers(1, 4),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_means_and_what_is_kept_add_up_to_what_went_in(
    compression: Compression, shapes: Any, num_ranks: int, num_rounds: int, exponent: int, seed: int
) -> None:
    ranks = averagers(compression, shapes, num_ranks)
    rounds = [drawn(shapes, num_ranks, seed + i, 10.0**exponent) for i in range(num_rounds)]
    came_out = torch.stack([mean_of_ranks(ranks, values).double() for values in rounds]).sum(0)
    kept = torch.stack([residual(rank).double() for rank in ranks]).mean(0)
    went_in = torch.stack([torch.stack(values).double().mean(0) for values in rounds]).sum(0)
    torch.testing.assert_close(came_out + kept, went_in, rtol=0, atol=3e-5 * 10.0**exponent)


@settings(max_examples=40)
@given(
    compression=st.sampled_from(ALL),
    shapes=shapes_of_tensors,
    num_ranks=st.integers(2, 4),
    seed=st.integers(0, 1000),
)
def test_saved_and_loaded_it_goes_on_with_the_same_bits(
    compression: Compression, shapes: Any, num_ranks: int, seed: int
) -> None:
    ranks, others = averagers(compression, shapes, num_ranks), averagers(compression, shapes, num_ranks)
    mean_of_ranks(ranks, drawn(shapes, num_ranks, seed))
    for rank, other in zip(ranks, others, strict=True):
        state = rank.state_dict()
        other.load_state_dict(state)
        assert other.state_dict().keys() == state.keys()
    values = drawn(shapes, num_ranks, seed + 1)
    assert torch.equal(mean_of_ranks(ranks, values), mean_of_ranks(others, values))


def test_without_error_feedback_nothing_of_the_values_is_kept() -> None:
    for compression in ALL:
        (rank,) = averagers(compression, [(8, 8), (3,)], 1)
        names = {name for tensors in rank.memory() for name in tensors}
        with case(compression):
            assert ("residual" in names) == compression.feeds_back
            assert compression.feeds_back == ("error feedback" in compression.in_words())


def test_what_is_not_finite_is_seen_once_and_not_kept() -> None:
    for compression, num_ranks, wrong in product(ALL, [2, 3], [math.nan, math.inf, -math.inf]):
        ranks = averagers(compression, SHAPES, num_ranks)
        values = drawn(SHAPES, num_ranks, 0)
        values[-1][7] = wrong
        with case(compression, num_ranks, wrong):
            assert not mean_of_ranks(ranks, values).isfinite().all()
            assert all(tensor.isfinite().all() for rank in ranks for tensor in rank.state_dict().values())
            assert mean_of_ranks(ranks, drawn(SHAPES, num_ranks, 1)).isfinite().all()


def test_zeros_stay_zeros_and_values_come_after_them() -> None:
    for compression in ALL:
        ranks = averagers(compression, SHAPES, 3)
        with case(compression):
            assert not mean_of_ranks(ranks, [torch.zeros(140)] * 3).any()
            assert mean_of_ranks(ranks, drawn(SHAPES, 3, 0)).any()


def test_doubles_are_averaged_as_doubles() -> None:
    exact = torch.stack(drawn(SHAPES, 3, 0)).double().mean(0)
    for compression in ALL:
        ranks = averagers(compression, SHAPES, 3, torch.float64)
        mean = mean_of_ranks(ranks, drawn(SHAPES, 3, 0))
        with case(compression):
            assert mean.dtype is torch.float64
            if compression.feeds_back:
                kept = torch.stack([residual(rank) for rank in ranks]).mean(0)
                tolerance = 1e-13 if compression in FED_BACK else 1e-2
                torch.testing.assert_close(mean + kept, exact, rtol=0, atol=tolerance)


@settings(max_examples=80)
@given(
    compression=st.sampled_from([one for one in ALL if "PowerSGD" not in str(one)]),
    shapes=shapes_of_tensors,
    num_ranks=st.integers(1, 4),
    wrong=st.sampled_from([0.0, math.nan, math.inf, 3e38, -1e-42]),
    seed=st.integers(0, 1000),
)
def test_without_the_native_library_all_bits_are_the_same(
    compression: Compression, shapes: Any, num_ranks: int, wrong: float, seed: int
) -> None:
    """So the ranks of a job get the same bits, if some of them lack it."""

    def results() -> list[Tensor]:
        ranks, found = averagers(compression, shapes, num_ranks), []
        for step in range(2):
            values = drawn(shapes, num_ranks, seed + step)
            values[-1][1:2] = wrong
            found += [
                mean_of_ranks(ranks, values),
                *(t for rank in ranks for t in rank.state_dict().values()),
            ]
        return [torch.where(one.isnan(), math.nan, one).view(-1).view(torch.uint8) for one in found]

    with_library = results()
    with patch.object(kernels, "library_if_any", lambda: None):
        without = results()
    assert all(torch.equal(a, b) for a, b in zip(with_library, without, strict=True))


# ---------------------------------------------------------------------- Cast


def test_a_cast_mean_is_as_precise_as_its_type_and_its_sum_does_not_overflow() -> None:
    values = drawn([(1000,)], 4, 0)
    exact = torch.stack(values).double().mean(0)
    size = torch.stack(values).abs().double().mean(0)
    for dtype, precision in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        mean = mean_of_ranks(averagers(Cast(dtype), [(1000,)], 4), values)
        with case(dtype):
            assert ((mean - exact).abs() <= 2 * precision * size).all()
    large = torch.tensor([60000.0])
    assert mean_of_ranks(averagers(Cast(torch.float16), [(1,)], 4), [large] * 4) == large


# ---------------------------------------------------------------------- Quantize


def quantized_by_hand(values: Tensor, bits: int, block_numel: int) -> Tensor:
    """What comes out, value by value."""
    largest, out = 2 ** (bits - 1) - 1, torch.zeros_like(values)
    for start in range(0, len(values), block_numel):
        block = values[start : start + block_numel]
        if bits == 2:
            missing = block_numel - len(block)  # the last block is filled up with zeros
            squares = torch.nn.functional.pad(block, (0, missing)).square()
            while len(squares) > 1:  # block_numel is a power of two here
                squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
            rms = (squares[0] / block_numel).sqrt().bfloat16().float()
            for i, value in enumerate(block):
                scaled = value * (1 / rms) if rms else torch.tensor(0.0)
                level = 1.5104 if scaled.abs() > 0.9816 else 0.4528
                out[start + i] = torch.tensor(level).copysign(scaled) * rms
            continue
        scale = (block.abs().max() / largest).bfloat16().float()
        for i, value in enumerate(block):
            code = torch.round(value * (1 / scale)).clamp(-largest, largest) if scale else torch.tensor(0.0)
            out[start + i] = code * scale
    return out


@settings(max_examples=30)
@given(
    bits=st.sampled_from([2, 4, 8]),
    block_numel=st.sampled_from([4, 8, 16]),
    numel=st.integers(1, 70),
    num_ranks=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_quantized_means_are_those_of_a_plain_loop(
    bits: Any, block_numel: int, numel: int, num_ranks: int, seed: int
) -> None:
    values = drawn([(numel,)], num_ranks, seed)
    compression = Quantize(bits, block_numel=block_numel, error_feedback=False)
    mean = mean_of_ranks(averagers(compression, [(numel,)], num_ranks), values)
    decoded = [quantized_by_hand(v, bits, block_numel) for v in values]
    if num_ranks == 2:
        torch.testing.assert_close(mean, torch.stack(decoded).mean(0), rtol=1e-6, atol=1e-7)
        return
    blocks_each = math.ceil(math.ceil(numel / num_ranks) / block_numel)
    expected = []
    for owner in range(num_ranks):
        chunk = slice(owner * blocks_each * block_numel, (owner + 1) * blocks_each * block_numel)
        total = torch.zeros_like(values[0][chunk])
        for rank in range(num_ranks):
            total += (values if rank == owner else decoded)[rank][chunk]
        expected.append(quantized_by_hand(total / num_ranks, bits, block_numel))
    assert torch.equal(mean, torch.cat(expected))


@settings(max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    values=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=40),
)
def test_a_value_is_off_by_half_a_step_at_most(bits: Any, values: list[float]) -> None:
    quantize = Quantize(bits, block_numel=8)
    tensor = torch.tensor(values)
    codes = quantize.encode(tensor)
    assert codes.numel() == quantize.num_bytes(len(values))
    decoded = quantize.decode(codes[None], len(values), torch.float32)[0]
    largest = torch.cat([block.abs().amax().expand(len(block)) for block in tensor.split(8)])
    num_steps = 2 ** (bits - 1) - 1
    step = largest / num_steps
    # The scale is rounded to 8 bits, by which the largest codes are off more than their rounding.
    tolerance = step * (0.5 + num_steps * 2.0**-8) + 2.0**-119
    assert ((decoded - tensor).abs() <= tolerance).all()


def test_codes_share_bytes() -> None:
    for bits, num_bytes in ((2, 32), (4, 64), (8, 128)):
        quantize = Quantize(bits, block_numel=128)
        assert quantize.num_bytes(1280) == 10 * (2 + num_bytes) == quantize.encode(torch.randn(1280)).numel()


# ---------------------------------------------------------------------- TopK


@settings(max_examples=30)
@given(
    numel=st.integers(1, 60), ratio=st.floats(0.01, 1.0), num_ranks=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_topk_is_that_of_a_plain_loop_over_rounds(
    numel: int, ratio: float, num_ranks: int, seed: int
) -> None:
    ranks = averagers(TopK(ratio), [(numel,)], num_ranks)
    kept = [torch.zeros(numel) for _ in range(num_ranks)]
    for i in range(3):
        values = drawn([(numel,)], num_ranks, seed + i)
        expected = torch.zeros(numel)
        for rank in range(num_ranks):
            kept[rank] += values[rank]
            for place in sorted(range(numel), key=lambda j: -abs(kept[rank][j].item()))[
                : math.ceil(ratio * numel)
            ]:
                expected[place] += kept[rank][place] / num_ranks
                kept[rank][place] = 0
        torch.testing.assert_close(mean_of_ranks(ranks, values), expected)
    for rank in range(num_ranks):
        torch.testing.assert_close(residual(ranks[rank]), kept[rank])


def test_the_largest_of_many_are_found() -> None:
    numel, number = 200_000, 1_500
    for kind in (*KINDS, "nan"):
        values = values_of_kind(kind, numel)
        if kind == "nan":
            values[[5, 77777]] = math.nan
        places = largest_places(values, number)
        found, expected = (values.abs()[p] for p in (places, values.abs().topk(number).indices))
        with case(kind):
            assert len(set(places.tolist())) == number
            assert torch.equal(found.sort().values.nan_to_num(-1), expected.sort().values.nan_to_num(-1))


# ---------------------------------------------------------------------- PowerSGD


def test_power_sgd_is_that_of_the_paper_over_rounds() -> None:
    """Algorithms 1 and 2 for one matrix, with warm start and error feedback, all ranks in one loop, in float64."""
    n, m, rank, num_ranks = 12, 15, 3, 2
    ranks = averagers(PowerSGD(rank), [(n, 3, 5), (4,)], num_ranks)
    q = ranks[0].memory()[0]["start"].double().t()  # (m, rank)
    errors = [torch.zeros(n, m, dtype=torch.float64) for _ in range(num_ranks)]
    for i in range(6):
        values = drawn([(n, m), (4,)], num_ranks, i)
        deltas = [v[: n * m].view(n, m).double() + e for v, e in zip(values, errors, strict=True)]
        p = torch.linalg.qr(sum(delta @ q for delta in deltas) / num_ranks).Q
        q = sum(delta.t() @ p for delta in deltas) / num_ranks
        errors = [delta - p @ (p.t() @ delta) for delta in deltas]
        mean = mean_of_ranks(ranks, values)
        torch.testing.assert_close(mean[: n * m].view(n, m), (p @ q.t()).float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean[n * m :], (values[0] + values[1])[n * m :] / 2)
    for averager, error in zip(ranks, errors, strict=True):
        kept = averager.memory()
        torch.testing.assert_close(kept[0]["residual"].view(n, m), error.float(), rtol=1e-3, atol=1e-4)
        assert not kept[1]["residual"].any()


def of_rank(rank: int, rows: int, columns: int) -> Tensor:
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, rank, generator=g) @ torch.randn(rank, columns, generator=g)).view(-1)


def test_a_matrix_of_the_rank_comes_through_whole_and_degenerate_ones_leave_no_trace() -> None:
    """Rank 1, where rank 4 is asked for, and zeros before: later matrices are approximated by four vectors again."""
    matrix = of_rank(2, 30, 20)
    ranks = averagers(PowerSGD(2, error_feedback=False), [(30, 20)], 2)
    mean = mean_of_ranks(ranks, [0.5 * matrix, 1.5 * matrix])
    torch.testing.assert_close(mean, matrix, rtol=1e-4, atol=1e-5)
    zeros, ones, matrix = torch.zeros(256), torch.ones(256), of_rank(4, 16, 16)
    for feeds_back in (True, False):
        ranks = averagers(PowerSGD(4, error_feedback=feeds_back), [(16, 16)], 2)
        mean_of_ranks(ranks, [zeros] * 2)
        for _ in range(2):
            mean = mean_of_ranks(ranks, [ones] * 2)
            torch.testing.assert_close(mean, ones, rtol=1e-4, atol=1e-5)
        for _ in range(3):
            mean = mean_of_ranks(ranks, [matrix] * 2)
        with case(feeds_back):
            torch.testing.assert_close(mean, matrix, rtol=1e-3, atol=1e-3)


def test_only_what_gets_smaller_is_compressed() -> None:
    shapes = [(64, 64), (64,), (2, 64), (4, 4), (), (0, 8), (16, 4, 3, 3)]
    (rank,) = averagers(PowerSGD(2), shapes, 1)
    compressed = [index for index, tensors in enumerate(rank.memory()) if "start" in tensors]
    assert compressed == [0, 6]
    (whole,) = averagers(PowerSGD(4), [(4, 5), (3,)], 1)
    assert all("start" not in tensors for tensors in whole.memory())


@settings(max_examples=60)
@given(
    compression=st.sampled_from(
        [PowerSGD(1), PowerSGD(2), PowerSGD(3, error_feedback=False), Chain(PowerSGD(2), Quantize(4))]
    ),
    shapes=shapes_of_tensors,
    num_ranks=st.integers(2, 4),
    lacking=st.integers(0, 3),
    wrong=st.sampled_from([0.0, math.nan, math.inf, 3e38, -1e-42]),
    seed=st.integers(0, 1000),
)
def test_ranks_that_lack_the_native_library_get_the_bits_of_the_others(
    compression: Compression, shapes: Any, num_ranks: int, lacking: int, wrong: float, seed: int
) -> None:
    ranks = averagers(compression, shapes, num_ranks)
    native = power_sgd.library_for
    turn = iter(range(3 * num_ranks))

    def library_for(*tensors: Tensor | None) -> Library | None:
        return native(*tensors) if next(turn) % num_ranks != lacking else None

    with patch.object(power_sgd, "library_for", library_for):
        for step in range(3):
            values = drawn(shapes, num_ranks, seed + step)
            values[-1][1:2] = wrong if step == 1 else 1.0
            mean_of_ranks(ranks, values)  # asserts that the bits are the same
            starts = [{key: t for key, t in one.state_dict().items() if "start" in key} for one in ranks]
            assert all(torch.equal(one[key], starts[0][key]) for one in starts for key in one)


def test_the_default_dtype_of_the_program_does_not_matter() -> None:
    values = drawn(SHAPES, 2, 0)

    def means() -> list[Tensor]:
        return [
            mean_of_ranks(averagers(compression, SHAPES, 2), values)
            for compression in (PowerSGD(1), TopK(0.5), Quantize(4), Cast())
        ]

    expected = means()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        for found, wanted in zip(means(), expected, strict=True):
            assert found.dtype is torch.float32
            assert torch.equal(found, wanted)


def test_the_error_of_power_sgd_is_computed_while_factors_are_sent() -> None:
    """By the work that a request brings along; so the answer finds it done."""
    values = drawn([(12, 10)], 1, 0)[0]
    alone, (rank,) = averagers(PowerSGD(2), [(12, 10)], 1)[0], averagers(PowerSGD(2), [(12, 10)], 1)
    expected = mean_of_ranks([alone], [values])
    averaging = rank.mean(values.clone())
    first = next(averaging)
    assert first.meanwhile is None
    second = averaging.send(Averaged(first.values))
    second.meanwhile()
    torch.testing.assert_close(residual(rank), residual(alone))
    with pytest.raises(StopIteration) as ended:
        averaging.send(Averaged(second.values))
    assert torch.equal(ended.value.value, expected)
    assert torch.equal(residual(rank), residual(alone))


matrices = st.tuples(
    st.integers(1, 4), st.integers(1, 40), st.integers(0, 99), st.integers(-15, 15), st.booleans()
)


@settings(max_examples=60)
@given(st.lists(matrices, min_size=1, max_size=4))
def test_rows_become_orthonormal_or_zero_and_span_the_same(kinds: list[Any]) -> None:
    given_rows = []
    for rows, width, seed, exponent, repeats in kinds:
        matrix = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
        if repeats:
            matrix[-1] = 2 * matrix[0]
        given_rows.append(matrix)
    for matrix, ortho in zip(given_rows, orthonormal_rows(given_rows), strict=True):
        assert ortho.shape == matrix.shape
        gram = (ortho.double() @ ortho.double().t()).abs()
        lengths = gram.diagonal()
        assert (((lengths - 1).abs() < 1e-5) | (lengths == 0)).all()
        assert (gram - gram.diagonal().diag()).max() < 1e-5
        projected = matrix.double() @ ortho.double().t() @ ortho.double()
        scale = matrix.abs().max().item()
        torch.testing.assert_close(projected, matrix.double(), rtol=0, atol=1e-4 * scale)
        # By itself or among others, the bits are the same.
        assert torch.equal(orthonormal_rows([matrix])[0], ortho)


def test_rows_that_nearly_depend_on_each_other_become_orthogonal_to_the_last_digits() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 50, generator=g, dtype=torch.float64)
    rows[1:] = rows[0] + 1e-10 * rows[1:]
    (ortho,) = orthonormal_rows([rows])
    torch.testing.assert_close(ortho @ ortho.t(), torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-13)


def test_the_largest_code_is_never_too_large() -> None:
    """Scales of all mantissas, also those that bfloat16 rounds down by most."""
    largest = torch.linspace(1, 4, 40_001)
    for bits in (8, 4):
        quantize = Quantize(bits, block_numel=2)
        values = torch.stack([largest, -largest], 1).view(-1)
        decoded = quantize.decode(quantize.encode(values)[None], len(values), torch.float32)[0]
        torch.testing.assert_close(decoded, values, rtol=2.0**-8, atol=0)


def test_factors_have_the_same_bits_whatever_the_number_of_threads() -> None:
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, 70_001, generator=g), torch.randn(3, 301, generator=g)]
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            left, right = orthonormal_rows(rows)
            product = torch.empty(5_001, 301)
            sum_of_outer_products(left[:, :5_001].contiguous(), right, out=product)
            found.append((left, right, product))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---------------------------------------------------------------------- one after the other


def test_one_compression_follows_another_after_that_many_averagings() -> None:
    """What each gives is what it would have given alone, were the residual that it finds the same."""
    num_ranks, then = 3, PowerSGD(2)
    for before in (None, Quantize(8), PowerSGD(1)):
        ranks = averagers(After(2, then, before=before), SHAPES, num_ranks)
        alone = averagers(before or After(9, then), SHAPES, num_ranks)  # of 9 averagings none is compressed
        later = averagers(then, SHAPES, num_ranks)
        with case(before):
            for step in range(2):
                values = drawn(SHAPES, num_ranks, step)
                assert torch.equal(mean_of_ranks(ranks, values), mean_of_ranks(alone, values))
            values = drawn(SHAPES, num_ranks, 2)
            kept = [residual(rank) for rank in ranks]
            assert any(tensor.any() for tensor in kept) == (before is not None)
            added = [value + tensor for value, tensor in zip(values, kept, strict=True)]
            assert torch.equal(mean_of_ranks(ranks, values), mean_of_ranks(later, added))


# ---------------------------------------------------------------------- descriptions


def test_a_chain_that_makes_no_sense_is_refused() -> None:
    cases: list[tuple[list[Compression], str]] = [
        ([Quantize(8), Cast()], r"Cast.* cannot follow Quantize.*Quantize can only be the last stage"),
        ([Cast(), Quantize(8)], "Quantize.* cannot follow Cast.*Cast can only be the last stage"),
        ([TopK(), PowerSGD()], r"PowerSGD.* cannot follow TopK.*PowerSGD can only be the first stage"),
        ([PowerSGD(), PowerSGD()], "PowerSGD can only be the first stage"),
        ([TopK(), Chain(PowerSGD(), Cast())], "PowerSGD can only be the first stage"),
        ([TopK(), TopK()], "Only Cast or Quantize can follow TopK"),
        ([PowerSGD(), Cast(), Cast()], "Cast can only be the last stage"),
        ([Chain(PowerSGD(), Cast()), Quantize()], "Cast can only be the last stage"),
        ([After(1, Cast()), Cast()], "After can only be the last stage"),
        ([PowerSGD(), After(1, Cast())], "After can only be the first stage"),
        ([PowerSGD()], "two or more"),
    ]
    for stages, text in cases:
        with case(stages), pytest.raises(ValueError, match=text):
            Chain(*stages)


def test_values_that_do_not_go_together_are_refused() -> None:
    """What is no value of a parameter at all is refused in test_nonsense_arguments.py."""
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "^expected bits to be 8, 4 or 2, got 5$", Quantize, {"bits": 5}),
        (ValueError, "a multiple of 4", Quantize, {"bits": 2, "block_numel": 6}),
        (ValueError, "a multiple of 2", Quantize, {"bits": 4, "block_numel": 7}),
        (ValueError, "at least 2", Quantize, {"bits": 4, "block_numel": 0}),
        (ValueError, "at least 1", PowerSGD, {"rank": 0}),
        (ValueError, "at least 1, got 0", After, {"num_averagings": 0, "then": Cast()}),
        (
            TypeError,
            "num_averagings to be an integer.*PowerSGD",
            After,
            {"num_averagings": PowerSGD(), "then": 4},
        ),
    ]
    after, text = After(1, Cast()), "to be a compression other than After"
    cases += [
        (TypeError, f"expected then {text}", After, {"num_averagings": 1, "then": after}),
        (TypeError, f"expected before {text}", After, {"num_averagings": 1, "then": Cast(), "before": after}),
    ]
    for kind, text, make, arguments in cases:
        with case(make, arguments), pytest.raises(kind, match=text):
            make(**arguments)


def test_descriptions_are_values_and_say_what_is_not_the_default() -> None:
    assert PowerSGD(2) == PowerSGD(rank=2)
    assert Chain(TopK(), Cast()) == Chain(TopK(), Cast()) != Chain(TopK(), Quantize())
    assert len({Chain(TopK(), Cast()), Chain(TopK(), Cast())}) == 1
    assert str(Quantize(4, block_numel=64)) == "Quantize(bits=4, block_numel=64)"
    assert Chain(PowerSGD(4, seed=1), Cast()).in_words() == (
        "Chain(PowerSGD(rank=4, seed=1), Cast(dtype=bfloat16)) with error feedback"
    )
    assert PowerSGD(2, error_feedback=False).in_words() == "PowerSGD(rank=2, error_feedback=False)"
    assert After(9, PowerSGD(2), before=Quantize(4)).in_words() == (
        "After(9, PowerSGD(rank=2), before=Quantize(bits=4)) with error feedback"
    )
    assert str(After(9, Cast())) == "After(9, Cast(dtype=bfloat16))"
    assert After(9, Cast()) == After(9, Cast()) != After(9, Cast(), before=TopK())


def test_properties_of_chains_are_those_of_their_stages() -> None:
    chain = Chain(PowerSGD(), Quantize(8))
    assert chain.is_order_dependent
    assert not Chain(TopK(), Cast()).is_order_dependent


def test_state_of_another_compression_is_refused_and_changes_nothing() -> None:
    (rank,) = averagers(PowerSGD(2), [(20, 20), (3,)], 1)
    before = rank.state_dict()
    (other,) = averagers(PowerSGD(3), [(20, 20), (3,)], 1)
    wrong = other.state_dict()
    wrong["1.residual"] += 1
    with pytest.raises(ValueError, match="saved with another compression, or for another tensor"):
        rank.load_state_dict(wrong)
    with pytest.raises(ValueError, match="got a state of tensor 7"):
        rank.load_state_dict({**before, "7.residual": torch.zeros(1)})
    assert all(torch.equal(before[name], tensor) for name, tensor in rank.state_dict().items())
