"""Shards of buckets: by arithmetic."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.gradients.bucket_plan import BucketCaps, BucketPlan, ParameterSpec, plan_buckets
from syncline.gradients.shard_plan import ALIGNMENT_NUMEL, bounds_of, pieces_of, spans_in


def plans_for(
    sizes: list[int], num_ranks: int, cap_numel: int = 10**9, align_numel: int = 1
) -> tuple[BucketPlan, ...]:
    specs = [
        ParameterSpec(name=f"p{i}", numel=n, itemsize_bytes=4, dtype="float32", device="cpu")
        for i, n in enumerate(sizes)
    ]
    caps = BucketCaps(cap_bytes=4 * cap_numel, first_cap_bytes=4 * cap_numel)
    order = list(reversed(range(len(sizes))))
    return plan_buckets(
        specs,
        order,
        caps=caps,
        tail_numel=0,
        align_numel=align_numel,
        multiple_of=num_ranks * ALIGNMENT_NUMEL,
    )


def sizes_from(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice([0, 1, 7, 64, 1000, 20_000]) for _ in range(chance.randint(1, 30))]


seeds, numbers_of_ranks = st.integers(0, 1000), st.integers(1, 6)


@given(seed=seeds, num_ranks=numbers_of_ranks)
def test_equal_spans_are_equal_and_aligned(seed: int, num_ranks: int) -> None:
    plans = plans_for(sizes_from(seed), num_ranks, cap_numel=30_000)
    for plan, cuts in zip(plans, bounds_of(plans, num_ranks), strict=True):
        lengths = {stop - start for start, stop in pairwise(cuts)}
        assert len(lengths) == 1
        assert lengths.pop() % ALIGNMENT_NUMEL == 0
        assert plan.numel <= cuts[-1] < plan.numel + num_ranks * ALIGNMENT_NUMEL


@settings(max_examples=60)
@given(
    seed=seeds,
    num_ranks=numbers_of_ranks,
    how=st.sampled_from(["flat", "by parameter", "whole"]),
    align_numel=st.sampled_from([1, ALIGNMENT_NUMEL]),
)
def test_every_element_is_in_one_piece_of_one_rank(
    seed: int, num_ranks: int, how: str, align_numel: int
) -> None:
    sizes = sizes_from(seed)
    plans = plans_for(sizes, num_ranks, cap_numel=30_000, align_numel=align_numel)
    whole = range(len(sizes)) if how == "whole" else ()
    bounds = bounds_of(plans, num_ranks, whole=whole)
    group_of = {i: i % 3 for i in range(len(sizes))}
    times = {plan.index: [0] * plan.numel for plan in plans}
    for rank in range(num_ranks):
        for piece in pieces_of(
            plans, bounds, rank, group_of, whole=how == "whole", by_parameter=how == "by parameter"
        ):
            plan = plans[piece.bucket]
            spans = spans_in(plan, piece.start, piece.stop)
            assert {group_of[plan.parameters[position]] for position, _, _ in spans} == {piece.group}
            if how != "flat":
                assert [plan.parameters[position] for position, _, _ in spans] == [piece.parameter]
            if how == "whole":
                assert piece.stop - piece.start == sizes[piece.parameter or 0]
            for at in range(piece.start, piece.stop):
                times[piece.bucket][at] += 1
    for plan in plans:
        for offset, numel in zip(plan.offsets, plan.numels, strict=True):
            assert offset % align_numel == 0
            assert set(times[plan.index][offset : offset + numel]) <= {1}
        assert set(times[plan.index]) <= {0, 1}


def test_one_group_is_one_piece_a_bucket() -> None:
    plans = plans_for([100] * 12, 2, cap_numel=600)
    pieces = pieces_of(plans, bounds_of(plans, 2), 0, dict.fromkeys(range(12), 0))
    assert [piece.bucket for piece in pieces] == [0, 1]


def test_parameters_of_nobody_are_left_out() -> None:
    plans = plans_for([10, 10, 10], 1)  # laid out as 2, 1, 0
    pieces = pieces_of(plans, bounds_of(plans, 1), 0, {2: 0, 0: 0})
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 10), (20, 30)]


@settings(max_examples=20)
@given(seed=seeds)
def test_whole_parameters_are_balanced_over_all_buckets(seed: int) -> None:
    """No rank has more than an equal share and the largest parameter."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 1000) for _ in range(40)]
    for num_ranks in (2, 3, 4):
        plans = plans_for(sizes, num_ranks, cap_numel=4000)
        bounds = bounds_of(plans, num_ranks, whole=range(40))
        loads = [
            sum(
                min(cuts[r + 1], plan.numel) - min(cuts[r], plan.numel)
                for plan, cuts in zip(plans, bounds, strict=True)
            )
            for r in range(num_ranks)
        ]
        assert sum(loads) == sum(sizes)
        assert max(loads) <= sum(sizes) / num_ranks + max(sizes)


def test_only_buckets_with_whole_parameters_have_unequal_spans() -> None:
    plans = plans_for([100, 300, 70, 900], 2, cap_numel=400)
    of_3, rest = plans[0], plans[1:]
    assert of_3.parameters == (3,)
    bounds = bounds_of(plans, 2, whole=[3])
    assert bounds[0] in [(0, 900, 960), (0, 0, 960)]
    assert bounds[1:] == bounds_of(rest, 2)
