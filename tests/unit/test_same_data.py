"""Ranks that train on the same data are noticed; no others. Ranks are threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.transport import Transport, run_ranks

Batch = Callable[[int, int], Tensor]
"""By rank and step."""


def batch(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def warned(of: Batch, num_steps: int = 14, **arguments: Any) -> list[str]:
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
)
def test_the_same_data_on_all_ranks_is_warned_of_once(arguments: dict[str, Any]) -> None:
    (text,) = warned(lambda rank, step: batch(step), **arguments)
    assert "in steps 1 to 10" in text
    assert "sl.DistributedSampler" in text
    assert "SameDataWarning" in text


@pytest.mark.parametrize(
    "of",
    [
        lambda rank, step: batch(2 * step + rank),
        lambda rank, step: batch(step if step < 9 else 2 * step + rank),  # equal for a while, by chance
        lambda rank, step: torch.zeros(4, 5)[:0],
    ],
    ids=["different", "different from step 10 on", "empty"],
)
def test_no_false_alarm(of: Batch) -> None:
    assert warned(of) == []


def test_strategies_under_which_gradients_stay_local_are_not_watched() -> None:
    assert warned(lambda rank, step: batch(step), strategy=sl.LocalSGD(20)) == []


def test_nothing_more_is_sent_once_it_is_decided() -> None:
    def program(t: Transport) -> tuple[bool, bool]:
        ddp = sl.DistributedDataParallel(nn.Linear(5, 2), process_group=t)
        watch = ddp._replica.gradients.riders.same_data
        before = watch.is_open
        ddp(batch(t.rank)).square().sum().backward()
        return before, watch.is_open

    assert run_ranks(2, program) == [(True, False)] * 2
