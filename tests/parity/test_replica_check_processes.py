"""sl.ReplicaCheck on real processes, over Gloo and over shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline import ReplicaDivergence


def trained(*, flipped: bool, **kwargs: Any) -> sl.DistributedDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = sl.DistributedDataParallel(module, replica_check=sl.ReplicaCheck(every=3), **kwargs)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
    for step in range(7):
        if flipped and step == 4 and dist.get_rank() == 1:
            module[3].bias.detach().view(torch.int32)[2] ^= 1
        optimizer.zero_grad()
        ddp(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
    return ddp


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_one_bit_is_found_and_named_and_equal_replicas_cost_no_further_call(transport: Any) -> None:
    sl.init(transport=transport, timeout=60)
    for kwargs in ({}, {"compression": sl.compression.Cast(torch.bfloat16)}, {"bucket_cap_mb": 0.001}):
        with pytest.raises(ReplicaDivergence) as caught:
            trained(flipped=True, **kwargs)
        error = caught.value
        assert (error.tensor, error.elements, error.minority_ranks) == ("3.bias", (2, 2), (1,)), kwargs
        assert error.found_at_step in (5, 6, 7)
    ddp = trained(flipped=False)
    assert ddp.contract["replica check"].last_done == "step 7: equal"
    before = ddp.statistics().total_calls
    ddp(torch.randn(6, 8)).sum().backward()
    assert ddp.last_step is not None
    num_calls = ddp.statistics().total_calls - before
    assert num_calls == len(ddp.last_step.buckets) + 1, "the buckets, and the buffers"


@pytest.mark.ranks(2)
def test_a_rank_without_inputs_is_not_compared() -> None:
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(nn.Linear(3, 2), replica_check=sl.ReplicaCheck(every=1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for _ in range(2 + 3 * dist.get_rank()):  # rank 0 stops stepping after 2
            optimizer.zero_grad()
            ddp(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    sl.check_replicas(ddp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_healthy_replicas_with_buffers_of_their_own_pass(transport: Any) -> None:
    world = sl.init(transport=transport, timeout=60)
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    g = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, generator=g)).square().mean().backward()
        optimizer.step()
    assert sl.check_replicas(ddp).may_differ == ("module.1.running_mean", "module.1.running_var")
