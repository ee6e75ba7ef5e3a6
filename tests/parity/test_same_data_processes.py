"""A plain DataLoader on real processes: rank 0 warns that all ranks train on the same data."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport


def num_warnings(t: Transport, *, sampled: bool) -> int:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(96, 3), torch.randn(96, 1))
    sampler = sl.DistributedSampler(dataset, num_replicas=t.size, rank=t.rank) if sampled else None
    ddp = sl.DistributedDataParallel(nn.Linear(3, 1), process_group=t)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=sampler is None):
            (ddp(x) - y).square().mean().backward()
    return sum(issubclass(one.category, sl.SameDataWarning) for one in found)


@pytest.mark.ranks(2)
def test_a_plain_loader_is_warned_of_on_rank_0_and_a_sampled_one_is_not() -> None:
    for t in (transport_of(None), C10dTransport()):
        assert num_warnings(t, sampled=False) == (t.rank == 0)
        assert num_warnings(t, sampled=True) == 0
