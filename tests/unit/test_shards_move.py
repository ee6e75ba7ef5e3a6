"""The shards of a module in another group of ranks: the optimizer's state moves, and what is lost begins anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.transport import ThreadGroup, Transport, run_ranks

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()


def by_adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def by_whole_parameters(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [by_adam, by_whole_parameters])
@pytest.mark.parametrize("num_left", [1, 2])
def test_the_state_moves_to_the_ranks_that_are_left(num_left: int, make: MakeOptimizer) -> None:
    """Parameters of the lost shard have new state. All ranks have the same values, and train on."""
    start, smaller = net(), ThreadGroup(num_left)

    def program(t: Transport) -> tuple[dict[str, Any], dict[str, Any], list[Tensor], list[int]] | None:
        ddp = sl.DistributedDataParallel(copy.deepcopy(start), process_group=t, sharded=True)
        optimizer = ddp.attach(make(ddp))
        for _ in range(3):
            step(ddp, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        if t.rank >= num_left:
            return None
        lane = smaller.transport(t.rank)
        ddp._replica.use_transport(lane)
        if ddp._replica.sharding is not None:
            ddp._replica.sharding.settle()
        after = copy.deepcopy(optimizer.state_dict())
        step(ddp, optimizer)
        last = optimizer.state_dict()
        steps = sorted({int(state["step"]) for state in last["state"].values()})
        # A save with different step counts can be loaded by ranks that have lost nothing.
        other = sl.DistributedDataParallel(copy.deepcopy(start), process_group=lane, sharded=True)
        loaded = other.attach(make(other)) if num_left > 1 else make(other)
        loaded.load_state_dict(last)
        assert_equal(loaded.state_dict(), last)
        step(other, loaded)
        return before, after, [p.detach().clone() for p in ddp.parameters()], steps

    results = run_ranks(3, program)
    for before, after, parameters, steps in results[:num_left]:
        assert before["param_groups"] == after["param_groups"]
        kept = after["state"].keys()
        assert 0 < len(kept) < len(before["state"])
        for index in kept:
            assert_equal(after["state"][index], before["state"][index])
        assert steps == [1, 4]
        for mine, first in zip(parameters, results[0][2], strict=True):
            assert torch.equal(mine, first)


def test_shards_that_not_all_ranks_have_are_given_back() -> None:
    """A second rank is lost while the shards move. The ranks that are left move them again, from where they were."""
    start, groups = net(), [ThreadGroup(2), ThreadGroup(2)]

    def program(t: Transport) -> tuple[dict[str, Any], dict[str, Any]] | None:
        ddp = sl.DistributedDataParallel(copy.deepcopy(start), process_group=t, sharded=True)
        optimizer = ddp.attach(by_adam(ddp))
        step(ddp, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        if t.rank < 2:
            ddp._replica.use_transport(groups[0].transport(t.rank))
        if t.rank == 0:
            return None
        ddp._replica.use_transport(groups[1].transport(t.rank - 1))
        return before, copy.deepcopy(optimizer.state_dict())

    for result in run_ranks(3, program)[1:]:
        assert result is not None
        before, after = result
        assert after["state"].keys() >= {0, 1, 2}  # parts of rank 2's shard, which the first move has lost
        for index, state in after["state"].items():  # only the shard of rank 0 is lost, not that of rank 2
            assert_equal(state, before["state"][index])


def assert_equal(first: Any, second: Any) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_equal(value, second[key])
    elif isinstance(first, Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second
