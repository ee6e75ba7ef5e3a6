"""The shards of a module in another group of ranks: the optimizer's state moves, and what is lost begins anew."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import syncline as sl
from support.cases import case
from support.inside import replica_of
from support.values import exact
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


def test_the_state_moves_to_the_ranks_that_are_left() -> None:
    """Parameters of the lost shard have new state. All ranks have the same values, and train on."""
    start = net()

    def program(t: Transport, num_left: int, smaller: ThreadGroup, make: MakeOptimizer) -> Any:
        ddp = sl.DistributedDataParallel(copy.deepcopy(start), process_group=t, sharded=True)
        optimizer = ddp.attach(make(ddp))
        for _ in range(3):
            step(ddp, optimizer)
        before = exact(optimizer.state_dict())
        if t.rank >= num_left:
            return None
        lane = smaller.transport(t.rank)
        replica_of(ddp).use_transport(lane)
        after = exact(optimizer.state_dict())
        step(ddp, optimizer)
        last = optimizer.state_dict()
        assert {int(state["step"]) for state in last["state"].values()} == {1, 4}
        # A save with different step counts can be loaded by ranks that have lost nothing.
        other = sl.DistributedDataParallel(copy.deepcopy(start), process_group=lane, sharded=True)
        loaded = other.attach(make(other)) if num_left > 1 else make(other)
        loaded.load_state_dict(last)
        assert exact(loaded.state_dict()) == exact(last)
        step(other, loaded)
        return before, after, exact(list(ddp.parameters()))

    def moved(num_left: int, make: MakeOptimizer) -> None:
        smaller = ThreadGroup(num_left)
        results = run_ranks(3, lambda t: program(t, num_left, smaller, make))[:num_left]
        for before, after, parameters in results:
            assert before["param_groups"] == after["param_groups"]
            assert 0 < len(after["state"]) < len(before["state"])
            assert after["state"] == {index: before["state"][index] for index in after["state"]}
            assert parameters == results[0][2]

    for num_left, make in itertools.product((1, 2), (by_adam, by_whole_parameters)):
        with case(num_left, make.__name__):
            moved(num_left, make)


def test_shards_that_not_all_ranks_have_are_given_back() -> None:
    """A second rank is lost while the shards move. The ranks that are left move them again, from where they were."""
    start, groups = net(), [ThreadGroup(2), ThreadGroup(2)]

    def program(t: Transport) -> Any:
        ddp = sl.DistributedDataParallel(copy.deepcopy(start), process_group=t, sharded=True)
        optimizer = ddp.attach(by_adam(ddp))
        step(ddp, optimizer)
        before = exact(optimizer.state_dict())["state"]
        if t.rank < 2:
            replica_of(ddp).use_transport(groups[0].transport(t.rank))
        if t.rank == 0:
            return None
        replica_of(ddp).use_transport(groups[1].transport(t.rank - 1))
        return before, exact(optimizer.state_dict())["state"]

    for before, after in run_ranks(3, program)[1:]:
        assert after.keys() >= {0, 1, 2}  # parts of rank 2's shard, which the first move has lost
        # Only the shard of rank 0 is lost, not that of rank 2.
        assert after == {index: before[index] for index in after}
