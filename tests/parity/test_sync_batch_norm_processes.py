"""SyncBatchNorm on real processes over Gloo, against one process' BatchNorm on the concatenated batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by torch."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def batch(step: int, rank: int, num_samples: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_samples, 2, 6, 6, dtype=torch.float64, generator=g) + rank


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2)).double()


def train(run: nn.Module, module: nn.Module, batches: list[Tensor], *, counted: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        if counted:
            with run.normalize_by(len(x)):
                run(x).square().sum().backward()
        else:
            (run(x).square().sum() / len(x)).backward()
        optimizer.step()
    return [*module.parameters(), *module.buffers()]


def check_training(sizes: list[int]) -> None:
    rank, num_steps = dist.get_rank(), 5
    module = sl.nn.SyncBatchNorm.convert_sync_batchnorm(model())
    ddp = sl.DistributedDataParallel(module)
    mine = train(ddp, module, [batch(step, rank, sizes[rank]) for step in range(num_steps)], counted=True)
    alone = model()
    whole = [torch.cat([batch(step, r, n) for r, n in enumerate(sizes)]) for step in range(num_steps)]
    for got, expected in zip(mine, train(alone, alone, whole, counted=False), strict=True):
        # float64: sums of some hundred terms in another order, carried on for five steps.
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    everyone = gathered([tensor.tolist() for tensor in mine])
    assert everyone == [everyone[0]] * len(sizes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [[3, 3], [4, 1], [0, 3]], ids=str)
def test_two_ranks_train_as_one_process_does_on_the_whole_batch(sizes: list[int]) -> None:
    check_training(sizes)


@pytest.mark.ranks(3)
def test_three_ranks_with_unequal_batches_train_as_one_process() -> None:
    check_training([2, 0, 3])


@pytest.mark.ranks(3)
def test_statistics_stay_within_a_process_group() -> None:
    """One group of ranks 0 and 1; rank 2 makes no call."""
    group = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank == 2:
        return
    layer = sl.nn.SyncBatchNorm(3, process_group=group, momentum=1.0)
    x = torch.arange(12.0).view(4, 3) ** (rank + 1)
    layer(x)
    parts = [torch.arange(12.0).view(4, 3) ** (r + 1) for r in range(2)]
    torch.testing.assert_close(layer.running_mean, torch.cat(parts).mean(0))
    torch.testing.assert_close(layer.running_var, torch.cat(parts).var(0))


@pytest.mark.ranks(2)
def test_half_precision_and_channels_last_over_gloo() -> None:
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 3, 4, 4, generator=g).bfloat16()
    dy = torch.randn(6, 3, 4, 4, generator=g).bfloat16()
    mine = slice(0, 2) if rank == 0 else slice(2, 6)
    x = whole[mine].to(memory_format=torch.channels_last).requires_grad_()
    y = sl.nn.SyncBatchNorm(3)(x)
    y.backward(dy[mine])
    assert y.dtype is torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    expected = whole.clone().requires_grad_()
    out = nn.BatchNorm2d(3)(expected)
    out.backward(dy)
    assert x.grad is not None
    assert expected.grad is not None
    for got, reference in ((y, out[mine]), (x.grad, expected.grad[mine])):
        torch.testing.assert_close(got, reference, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-2)


@pytest.mark.ranks(2)
def test_a_copy_stays_in_its_group() -> None:
    layer = sl.nn.SyncBatchNorm(2, process_group=dist.group.WORLD)
    twin = copy.deepcopy(layer)
    assert twin.process_group is dist.group.WORLD
    twin(torch.full((1, 2), float(dist.get_rank())))
    torch.testing.assert_close(twin.running_mean, torch.full((2,), 0.05))
    assert layer.running_mean.tolist() == [0.0, 0.0]
