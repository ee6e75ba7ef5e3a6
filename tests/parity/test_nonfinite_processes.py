"""Gradients that are not finite, on real processes: shared memory and Gloo."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))

OUTCOMES: dict[Any, str] = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}


def engine(name: str) -> Transport:
    shared = transport_of(None)
    assert shared.name == "shared memory"
    return shared if name == "shared memory" else C10dTransport(timeout_seconds=30)


def batch(step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


@contextlib.contextmanager
def bad(parameter: Tensor, value: float, when: bool) -> Iterator[None]:
    """In this block, if `when`, the first element of its gradient is `value`."""
    at = torch.tensor([0])
    handle = parameter.register_hook(lambda g: g.reshape(-1).index_fill(0, at, value).view_as(g))
    if not when:
        handle.remove()
    yield
    handle.remove()


def assert_equal_on_all_ranks(value: Any) -> None:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [values[0]] * len(values)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["shared memory", "gloo"])
@pytest.mark.parametrize("policy", OUTCOMES)
def test_all_ranks_do_the_same_also_for_a_rank_without_inputs(name: str, policy: Any) -> None:
    """Rank 1 trains for longer, and its gradients are not finite while rank 0 trains as well, and afterwards."""
    ddp = sl.DistributedDataParallel(copy.deepcopy(NET), process_group=engine(name), on_nonfinite=policy)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    errors, outcomes = [], []

    def train(first: int, stop: int) -> None:
        for step in range(first, stop):
            optimizer.zero_grad()
            with bad(ddp.module[0].weight, math.nan, step in (1, 4) and dist.get_rank() == 1):
                try:
                    ddp(batch(step)).square().mean().backward()
                    optimizer.step()
                except sl.NonFiniteGradient as error:
                    errors.append((str(error), error.found))
                    if step >= 3:  # this ends `join` on all ranks
                        raise
                finally:
                    outcomes.append(ddp.last_step.nonfinite.outcome)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(0, 3)
        before = [p.tolist() for p in ddp.parameters()]
        is_over = pytest.raises(sl.NonFiniteGradient) if policy == "raise" else contextlib.nullcontext()
        with is_over as last, ddp.join():
            train(3, 6 if dist.get_rank() else 4)
    assert_equal_on_all_ranks(before)
    assert_equal_on_all_ranks([p.tolist() for p in ddp.parameters()])
    assert all(bool(p.isfinite().all()) for p in ddp.parameters())
    bad_steps = [step for step, outcome in enumerate(outcomes) if outcome == OUTCOMES[policy]]
    assert bad_steps == ([1, 4] if dist.get_rank() else [1])
    if policy == "raise":
        assert last is not None
        assert errors[0][1] == {1: ("0.weight",)}
        assert_equal_on_all_ranks(errors[0])
        assert_equal_on_all_ranks(str(last.value))
    else:
        told = [str(one.message) for one in caught if "rank 1: 0.weight (NaN in 1 of 120" in str(one.message)]
        assert len(told) == (2 if dist.get_rank() == 0 else 0)


@pytest.mark.ranks(2)
def test_with_a_scaler_everything_is_as_if_ignored() -> None:
    def trained(policy: Any) -> tuple[list[Tensor], list[float]]:
        ddp = sl.DistributedDataParallel(copy.deepcopy(NET), on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            with bad(ddp.module[0].weight, math.inf, (dist.get_rank(), step) == (1, 1)):
                scaler.scale(ddp(batch(step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p.detach() for p in ddp.parameters()], scales

    expected, scales = trained("ignore")
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    for policy in OUTCOMES:
        parameters, found = trained(policy)
        assert found == scales, policy
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True)), policy
