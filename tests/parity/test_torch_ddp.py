"""Against torch's own class, on the same Gloo group: the same gradients, bit for bit where both add two numbers."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, batch_of, build, optimizer_for, summed_loss

from support.cases import case
from syncline import DistributedDataParallel as DDP

TorchDDP = torch.nn.parallel.DistributedDataParallel


def train(name: str, wrap: Any, *, accumulate: int = 1, num_steps: int = 6) -> list[torch.Tensor]:
    ddp = wrap(copy.deepcopy(build(name)))
    optimizer = optimizer_for(ddp)
    gradients = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x, y = batch_of(name, step=10 * step + micro, rank=dist.get_rank(), num_samples=4)
            ddp.require_backward_grad_sync = micro == accumulate - 1
            (summed_loss(ddp(x), y) / y.numel()).backward()
        gradients += [p.grad.clone() for p in ddp.parameters()]
        optimizer.step()
    return gradients


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_torchs_bit_for_bit(name: str) -> None:
    """With two ranks a + b is the same in either order, and halving is exact."""
    for view, accumulate in itertools.product((False, True), (1, 3)):
        ours, theirs = (
            train(name, functools.partial(wrap, gradient_as_bucket_view=view), accumulate=accumulate)
            for wrap in (DDP, TorchDDP)
        )
        with case(view, accumulate):
            assert_same(ours, theirs)


class WithBatchNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_batch_norm_buffers_are_torchs_after_every_step() -> None:
    def run(wrap: Any, broadcast_buffers: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        ddp = wrap(WithBatchNorm(), broadcast_buffers=broadcast_buffers)
        optimizer = optimizer_for(ddp)
        seen = []
        for step in range(5):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
            optimizer.zero_grad()
            if step == 2:
                with ddp.no_sync():
                    ddp(x).square().sum().backward()
            else:
                ddp(x).square().sum().backward()
                optimizer.step()
            if step == 3:
                with torch.no_grad():
                    ddp(x)
            seen += [b.clone() for b in ddp.buffers()]
        return seen

    for broadcast_buffers in (True, False):
        with case(broadcast_buffers):
            assert_same(run(DDP, broadcast_buffers), run(TorchDDP, broadcast_buffers))
