"""Evolution strategies as arithmetic: pairs dealt out, noise from seeds, ranks of losses. No transport."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.evolution.members import centered_ranks, in_order, noise_, noise_seed, pair_weights, pairs_of

LOSSES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=40)


def noise(numel: int, *, seed: int = 0, step: int = 1, pair: int = 0) -> torch.Tensor:
    return noise_(torch.empty(numel), seed=seed, step=step, pair=pair)


# ---------------------------------------------------------------------- who evaluates what


@given(st.integers(1, 20), st.integers(1, 60))
def test_every_pair_has_one_rank_and_no_rank_has_two_more_than_another(
    num_ranks: int, num_pairs: int
) -> None:
    dealt = [pairs_of(rank, num_ranks, num_pairs) for rank in range(num_ranks)]
    assert sorted(itertools.chain(*dealt)) == list(range(num_pairs))
    sizes = [len(pairs) for pairs in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)


@given(st.integers(1, 20), st.integers(1, 60), st.integers(0, 3))
def test_losses_come_back_in_the_order_of_pairs(num_ranks: int, num_pairs: int, padding: int) -> None:
    rows = [
        [loss for pair in pairs_of(rank, num_ranks, num_pairs) for loss in (pair, pair + 0.5)]
        + [math.nan] * padding
        for rank in range(num_ranks)
    ]
    assert in_order(rows, num_pairs) == [pair / 2 for pair in range(2 * num_pairs)]


# ---------------------------------------------------------------------- noise


@settings(deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_pairs_of_one_step_never_share_a_seed(seed: int, step: int) -> None:
    seeds = {noise_seed(seed, step, pair) for pair in range(500)}
    assert len(seeds) == 500
    assert all(0 <= s < 2**32 for s in seeds)


def test_noise_depends_on_seed_step_and_pair_and_on_nothing_else() -> None:
    others = [noise(64), noise(64, seed=1), noise(64, step=2), noise(64, pair=1)]
    assert torch.equal(others[0], noise(64))
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(others, 2))
    expected, state = noise(1 << 17), torch.get_rng_state()
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    assert torch.equal(noise(1 << 17), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_has_variance_1_and_that_of_neighbours_is_uncorrelated() -> None:
    numel = 20_000
    rows = torch.stack(
        [noise(numel, step=step, pair=pair).double() for step, pair in itertools.product((1, 2), range(4))]
    )
    assert torch.allclose(rows.mean(1), torch.zeros(8, dtype=torch.double), atol=4 / math.sqrt(numel))
    # (8, 8): ones on the diagonal, elsewhere nothing but chance
    assert torch.allclose(rows @ rows.T / numel, torch.eye(8, dtype=torch.double), atol=6 / math.sqrt(numel))


# ---------------------------------------------------------------------- what the losses say


@given(LOSSES)
def test_ranks_are_centered_and_follow_the_order_of_losses(losses: list[float]) -> None:
    ranks = centered_ranks(losses)
    assert math.fsum(ranks) == pytest.approx(0, abs=1e-9)
    keys = [loss if math.isfinite(loss) else math.inf for loss in losses]
    for (a, x), (b, y) in itertools.combinations(zip(keys, ranks, strict=True), 2):
        assert (a < b, a == b) == (x < y, x == y)
    assert all(-0.5 <= rank <= 0.5 for rank in ranks)
    if len(set(keys)) == len(keys) > 1:
        assert (min(ranks), max(ranks)) == (-0.5, 0.5)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30), st.randoms())
def test_only_the_order_of_losses_counts_and_each_keeps_its_place(losses: list[int], random: Random) -> None:
    assert centered_ranks([math.exp(loss / 100) for loss in losses]) == centered_ranks(losses)
    order = list(range(len(losses)))
    random.shuffle(order)
    ranks = centered_ranks(losses)
    assert centered_ranks([losses[i] for i in order]) == [ranks[i] for i in order]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_a_mirrored_population_has_the_opposite_gradient(pairs: list[tuple[int, int]]) -> None:
    losses = [float(loss) for pair in pairs for loss in pair]
    mirrored = [float(loss) for pair in pairs for loss in reversed(pair)]
    weights = pair_weights(losses, 0.1)
    assert pair_weights(mirrored, 0.1) == [-weight for weight in weights]
    for (plus, minus), weight in zip(pairs, weights, strict=True):
        assert (plus > minus, plus == minus) == (weight > 0, weight == 0)


def test_equal_losses_move_nothing() -> None:
    assert pair_weights([3.0] * 8, 0.01) == [0.0] * 4
    assert pair_weights([math.nan, 1.0, math.inf, 1.0], 0.5) == pytest.approx([1 / 3, 1 / 3])
