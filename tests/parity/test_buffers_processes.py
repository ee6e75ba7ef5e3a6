"""Buffer policies on real processes over Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.buffers.policies import BufferSync
from syncline.session import transport_of


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by torch."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def model() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3, dtype=torch.float64))
    module[0].register_buffer("scale", torch.full((2,), 0.1))
    module[0].register_buffer("mask", torch.tensor([True, False]))
    return module


def check(policy: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    module, transport = model(), transport_of()
    for norm in module[1:]:
        norm.running_mean.fill_(float(rank))
        norm.running_var.fill_(2.0)
        norm.num_batches_tracked.fill_(rank)
    sync = BufferSync(module, transport, policy=policy)
    before = transport.statistics()
    sync.before_forward(next_is_due=True)
    num_calls = (transport.statistics() - before).num_calls
    values = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    everyone = gathered(values)
    assert everyone == [everyone[0]] * size
    average = policy == "average"
    assert num_calls == ({"all_reduce": 2} if average else {"broadcast": 1})
    mean = (size - 1) / 2 if average else 0.0
    variance = 2.0 + (size**2 - 1) / 12 if average else 2.0  # of 0 .. size - 1
    for i in (1, 2):
        assert values[f"{i}.running_mean"] == pytest.approx([mean] * 3, rel=1e-7)
        assert values[f"{i}.running_var"] == pytest.approx([variance] * 3, rel=1e-7)
        assert values[f"{i}.num_batches_tracked"] == (size - 1 if average else 0)
    assert torch.equal(module[0].scale, torch.full((2,), 0.1))
    assert values["0.mask"] == [True, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["broadcast", "average"])
def test_two_ranks_have_equal_buffers(policy: str) -> None:
    check(policy)


@pytest.mark.ranks(3)
def test_three_ranks_have_equal_buffers() -> None:
    check("average")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["broadcast", "average", "none"])
def test_after_equalize_rank_0_may_evaluate_alone(policy: str) -> None:
    module = model()
    sync = BufferSync(module, transport_of(), policy=policy)
    module[1].running_mean.fill_(1.0 + dist.get_rank())
    sync.sync()
    if dist.get_rank() == 0:
        sync.before_forward(next_is_due=False)
    dist.barrier()
    expected = 1.5 if policy == "average" else 1.0
    assert gathered(module[1].running_mean.tolist()) == [[expected] * 3] * 2
