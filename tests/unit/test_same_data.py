"""Ranks that train on the same data are noticed; no others. Ranks are threads, and once processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from support.inside import replica_of
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport, run_ranks

Batch = Callable[[int, int], Tensor]
"""By rank and step."""


def batch(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def heard(of: Batch, num_steps: int = 14, **arguments: Any) -> list[str]:
    """The warnings of a run on two ranks."""

    def program(t: Transport) -> None:
        module = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
        ddp = sl.DistributedDataParallel(module, process_group=t, **arguments)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        for step in range(num_steps):
            optimizer.zero_grad()
            ddp(of(t.rank, step)).square().sum().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(2, program)
    same = [one for one in found if issubclass(one.category, sl.SameDataWarning)]
    return [str(one.message) for one in same]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"sharded": True},
        {"compression": sl.compression.Cast(torch.bfloat16)},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=str,
)
def test_the_same_data_on_all_ranks_is_warned_of_once(arguments: dict[str, Any]) -> None:
    (text,) = heard(lambda rank, step: batch(step), **arguments)
    assert "in steps 1 to 10" in text
    assert "sl.DistributedSampler" in text
    assert "SameDataWarning" in text


@pytest.mark.parametrize(
    ("of", "num_steps", "arguments"),
    [
        (lambda rank, step: batch(2 * step + rank), 14, {}),
        (
            lambda rank, step: batch(step if step < 9 else 2 * step + rank),
            14,
            {},
        ),  # equal for a while, by chance
        (lambda rank, step: torch.zeros(4, 5)[:0], 14, {}),
        (lambda rank, step: batch(step)[: 4 if step >= 30 else 0], 44, {}),
        (lambda rank, step: batch(step), 14, {"strategy": sl.LocalSGD(20)}),
    ],
    ids=["different", "from step 10 on", "empty", "empty for too long to judge", "gradients stay local"],
)
def test_no_false_alarm(of: Batch, num_steps: int, arguments: dict[str, Any]) -> None:
    assert heard(of, num_steps, **arguments) == []


def test_nothing_more_is_sent_once_it_is_decided() -> None:
    def program(t: Transport) -> tuple[bool, bool]:
        ddp = sl.DistributedDataParallel(nn.Linear(5, 2), process_group=t)
        watch = replica_of(ddp).gradients.riders.same_data
        before = watch.is_open
        ddp(batch(t.rank)).square().sum().backward()
        return before, watch.is_open

    assert run_ranks(2, program) == [(True, False)] * 2


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
