"""Modules that change after wrapping, on all ranks or on one, over shared memory and Gloo, with several buckets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from syncline import ContractMismatch

DDP = sl.DistributedDataParallel


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def unfreeze_alone(ddp: Any) -> None:
    """Rank 0 evaluates with more parameters than it trains."""
    if dist.get_rank() == 0:
        ddp.module[0].requires_grad_(True)
        ddp.eval()(batch(0))
        ddp.train().module[0].requires_grad_(False)


def add_a_layer_without_parameters_alone(ddp: Any) -> None:
    if dist.get_rank() == 0:
        ddp.module.append(nn.Identity())


def convert_alone(ddp: Any) -> None:
    """Rank 0 evaluates in another precision."""
    if dist.get_rank() == 0:
        ddp.double().eval()(batch(0).double())
        ddp.float().train()


def unfreeze(ddp: Any) -> None:
    ddp.module[0].requires_grad_(True)


def unfreeze_all_but_one(ddp: Any) -> None:
    """The first gradients of the next backward are of parameters that are new."""
    ddp.module.requires_grad_(True)


CHANGES = (
    unfreeze_alone,
    add_a_layer_without_parameters_alone,
    convert_alone,
    unfreeze,
    unfreeze_all_but_one,
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_gradients_stay_the_mean(transport: str) -> None:
    sl.init(transport=transport)
    for change, cap_mb in itertools.product(CHANGES, (None, 100 / 2**20)):
        module, reference = net(), net()
        for index in [0, 4] if change is unfreeze_all_but_one else [0]:
            module[index].requires_grad_(False)
        ddp: Any = DDP(module, bucket_cap_mb=cap_mb)
        for step in range(1, 6):
            if step == 3:
                change(ddp)
            ddp.zero_grad()
            ddp(batch(step)).square().mean().backward()
            reference.zero_grad()
            for rank in range(2):
                (reference(batch(step, rank)).square().mean() / 2).backward()
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    with case(change.__name__, cap_mb, step, name):
                        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_what_one_rank_does_alone_is_never_sent_or_an_error_on_both(transport: str) -> None:
    sl.init(transport=transport)
    module = nn.Linear(8, 1)
    if dist.get_rank() == 0:
        module.register_buffer("bank", torch.zeros(3))
    ddp: Any = DDP(module, broadcast_buffers=False)
    for step in range(2):
        ddp(batch(step)).sum().backward()
    gradients = sl.gather(module.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    ddp = DDP(net())
    ddp(batch(1)).sum().backward()
    if dist.get_rank():
        ddp.double()
    with pytest.raises(sl.SynclineError):
        ddp(batch(2).to(ddp.module[0].weight.dtype)).sum().backward()


@pytest.mark.ranks(2)
def test_buffers_that_were_not_compared_are_compared_before_they_are_sent() -> None:
    module = nn.Linear(8, 1)
    module.register_buffer("bank", torch.zeros(3 + dist.get_rank()))
    ddp: Any = DDP(module, broadcast_buffers=False)
    with pytest.raises(ContractMismatch, match="bank"):
        ddp.sync_buffers_()


@pytest.mark.ranks(2)
def test_buffers_that_match_a_pattern_are_ignored_also_if_they_are_added() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    module[0].register_buffer("cache_q", torch.zeros(1))
    ddp: Any = DDP(module, ignore=["*.cache*"])
    for step in range(3):
        module[0].register_buffer("cache_k", torch.zeros(1 + step + dist.get_rank()))
        ddp(batch(step)).sum().backward()
