"""A forward sends nothing but buffers, as in torch: one rank may run a forward that no other rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import syncline as sl

pytestmark = pytest.mark.filterwarnings("ignore:step .*rank 0 ran forwards:RuntimeWarning")

TRANSPORTS = pytest.mark.parametrize("transport", ["c10d", "shm"])


@contextmanager
def wrapped(transport: str) -> Iterator[tuple[sl.DistributedDataParallel, int]]:
    """A wrapper that has done nothing yet, and this rank."""
    world = sl.init(transport)
    try:
        yield sl.DistributedDataParallel(nn.Linear(4, 2)), world.rank
    finally:
        sl.shutdown()


def train(ddp: sl.DistributedDataParallel, rank: int, step: int) -> None:
    """One step; afterwards all ranks have the mean of their gradients."""
    ddp.zero_grad()
    ddp(torch.full((3, 4), rank + step + 1.0)).square().sum().backward()
    for parameter in ddp.parameters():
        everyone = _of_all(parameter.grad)
        assert torch.equal(everyone[0], everyone[1])


def _of_all(gradient: Tensor) -> Tensor:
    own = torch.zeros(2, *gradient.shape)
    own[sl.world().rank] = gradient
    return sl.all_reduce_(own, "sum")


@pytest.mark.ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_rank_0_evaluates_before_the_first_step(transport: str, mode: str) -> None:
    with wrapped(transport) as (ddp, rank):
        if rank == 0:
            ddp.train(mode == "train")
            ddp(torch.randn(8, 4))
            ddp.train()
        sl.barrier()
        train(ddp, rank, 0)


@pytest.mark.ranks(2)
@TRANSPORTS
def test_rank_0_computes_the_accuracy_after_each_step(transport: str) -> None:
    with wrapped(transport) as (ddp, rank):
        for step in range(3):
            train(ddp, rank, step)
            if rank == 0:
                ddp(torch.randn(8, 4)).argmax(1).float().mean().item()
