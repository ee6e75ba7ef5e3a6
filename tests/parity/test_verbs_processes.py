"""The verbs on real processes over Gloo, against torch's own collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import CollectiveMismatch, ContractMismatch, barrier, broadcast_, mean


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by torch."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tensors_of_every_kind(rank: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 3, 8, 8, generator=g)
    return {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": torch.randn(700, 600, generator=g).t(),
        "large": torch.randn(1 << 19, generator=g),
        "half": torch.randn(5, generator=g).half(),
        "integers": torch.randint(-9, 9, (3,), generator=g),
        "switches": torch.randint(0, 2, (7,), generator=g, dtype=torch.bool),
        "scalar": torch.randn((), generator=g, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_broadcast_gives_the_same_bits_as_torch(asynchronous: bool) -> None:
    ours, theirs = (tensors_of_every_kind(dist.get_rank()) for _ in range(2))
    if asynchronous:
        broadcast_(ours, src=1, async_op=True).wait()
    else:
        broadcast_(ours, src=1)
    for name, tensor in theirs.items():
        whole = tensor.contiguous()
        dist.broadcast(whole, src=1)
        assert torch.equal(ours[name], whole), name
        assert ours[name].stride() == tensor.stride(), name


@pytest.mark.ranks(2)
def test_module_and_optimizer_are_made_equal_and_train_alike() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2 * (1 + dist.get_rank()))
    module(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    broadcast_(module)
    broadcast_(optimizer)
    batch = torch.arange(24.0).view(4, 6)
    for _ in range(3):
        optimizer.zero_grad()
        module(batch).square().sum().backward()
        optimizer.step()
    digests = [
        {name: tensor.tolist() for name, tensor in module.state_dict().items()},
        optimizer.param_groups[0]["lr"],
    ]
    first, second = gathered(digests)
    assert first == second
    assert first[1] == 1e-2


@pytest.mark.ranks(3)
def test_src_is_a_global_rank_also_in_a_subgroup() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        x = torch.full((3,), float(dist.get_rank()))
        broadcast_(x, src=2, group=group)
        assert x.tolist() == [2.0, 2.0, 2.0]
        assert mean(float(dist.get_rank()), group=group) == 1.5
        barrier(group)
        with pytest.raises(ValueError, match=r"which consists of ranks 1, 2, got 0"):
            broadcast_(x, src=0, group=group)


@pytest.mark.ranks(2)
def test_trees_that_differ_are_told_in_the_same_words_before_anything_is_sent() -> None:
    x = torch.full((2 + dist.get_rank(),), float(dist.get_rank()))
    with pytest.raises(ContractMismatch) as caught:
        broadcast_({"x": x})
    first, second = gathered(str(caught.value))
    assert first == second
    assert "expected torch.float32 (2,) on cpu (rank 0)" in first
    assert bool((x == dist.get_rank()).all())


@pytest.mark.ranks(2)
def test_a_target_that_one_rank_refuses_does_not_make_the_other_wait() -> None:
    with pytest.raises(TypeError, match=r"rank 1: .* got a str at \[1\]"):
        broadcast_([torch.zeros(1), "x" if dist.get_rank() else torch.zeros(1)])
    barrier()


@pytest.mark.ranks(2)
def test_ranks_in_different_verbs_are_told_so() -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: sl\.mean, .*\n  rank 1: sl\.broadcast_, "):
        mean(1.0) if dist.get_rank() == 0 else broadcast_(torch.zeros(1))
    barrier()


@pytest.mark.ranks(3)
def test_a_mean_is_that_of_the_values_and_the_same_bits_everywhere() -> None:
    rank = dist.get_rank()
    numbers = [[0.1, 1e17, 3.0, 1.0], [0.7, 1.0, math.pi, 2.0], [0.3, -1e17, 1 / 3, 5.0]]
    weights = [3, 5, 11]
    result = mean({"x": numbers[rank], "big": torch.full((10_000,), numbers[rank][0])}, weight=weights[rank])
    for i, got in enumerate(result["x"]):
        exact = math.fsum(w * row[i] for w, row in zip(weights, numbers, strict=True)) / sum(weights)
        # Products, sums and the quotient round once each, relative to the largest of them.
        assert abs(got - exact) <= 6 * 2.0**-53 * max(abs(row[i]) for row in numbers)
    torch.testing.assert_close(result["big"], torch.full((10_000,), result["x"][0]), rtol=4e-7, atol=0)
    everyone = gathered((result["x"], result["big"].tolist()))
    assert everyone == [everyone[0]] * 3


@pytest.mark.ranks(2)
def test_a_bad_weight_on_one_rank_is_an_error_on_both() -> None:
    with pytest.raises(
        ValueError, match="rank 1: expected weight to be a finite number of at least 0, got nan"
    ):
        mean(1.0, weight=math.nan if dist.get_rank() else 1.0)
    assert mean(float(dist.get_rank())) == 0.5


@pytest.mark.ranks(2)
def test_a_rank_without_items_contributes_nothing() -> None:
    loss, num_items = (math.nan, 0) if dist.get_rank() else (0.25, 10)
    assert mean({"loss": loss}, weight=num_items) == {"loss": 0.25}
