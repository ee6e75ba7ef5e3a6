"""Gradients that are not finite, on real processes: shared memory and Gloo."""

from __future__ import annotations

import copy
import math
import warnings
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


def engine(name: str) -> Transport:
    shared = transport_of(None)
    assert shared.name == "shared memory"
    return shared if name == "shared memory" else C10dTransport(timeout_seconds=30)


def batch(step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def put(parameter: Tensor, value: float) -> Any:
    """From now on the first element of its gradient is `value`."""

    def change(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[0] = value
        return changed

    return parameter.register_hook(change)


def assert_equal_on_all_ranks(value: Any) -> None:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [values[0]] * len(values)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kwargs", [{}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}])
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
@pytest.mark.parametrize("name", ["shared memory", "gloo"])
def test_all_ranks_do_the_same(name: str, policy: Any, kwargs: dict[str, Any]) -> None:
    net, plain = copy.deepcopy(NET), copy.deepcopy(NET)
    ddp = sl.DistributedDataParallel(net, process_group=engine(name), on_nonfinite=policy, **kwargs)
    optimizer = ddp.attach(torch.optim.AdamW(net.parameters(), lr=0.01))
    reference = sl.DistributedDataParallel(plain)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        is_bad = step in (0, 3)
        handles = [put(net[0].weight, math.nan)] if is_bad and dist.get_rank() == 1 else []
        if is_bad and policy == "raise":
            with pytest.raises(
                sl.NonFiniteGradient, match=rf"step {step + 1}, .*\n  rank 1: 0\.weight"
            ) as error:
                ddp(batch(step)).square().mean().backward()
            assert_equal_on_all_ranks((str(error.value), error.value.found))
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ddp(batch(step)).square().mean().backward()
            assert bool(caught) == (is_bad and dist.get_rank() == 0)
            optimizer.step()
        if not is_bad or policy == "zero":
            if is_bad and dist.get_rank() == 1:
                handles.append(put(plain[0].weight, 0.0))
            reference(batch(step)).square().mean().backward()
            plain_optimizer.step()
        assert ddp.last_step.nonfinite.num_steps == 1 + (step >= 3)
        for handle in handles:
            handle.remove()
    for mine, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert_equal_on_all_ranks([p.tolist() for p in net.parameters()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_a_rank_without_inputs_hears_of_it(policy: Any) -> None:
    net = copy.deepcopy(NET)
    ddp = sl.DistributedDataParallel(net, on_nonfinite=policy)
    optimizer = ddp.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    is_last = dist.get_rank() == 1
    outcomes = []

    def train() -> None:
        with ddp.join():
            for step in range(4 if is_last else 1):
                optimizer.zero_grad()
                handle = put(net[2].bias, math.inf) if step == 2 else None
                with ddp.normalize_by(5):
                    ddp(batch(step)).square().sum().backward()
                optimizer.step()
                outcomes.append(ddp.last_step.nonfinite.outcome)
                if handle is not None:
                    handle.remove()

    if policy == "raise":
        with pytest.raises(
            sl.NonFiniteGradient, match=r"rank 1: 2\.bias \(infinity in 1 of 2 elements\)"
        ) as error:
            train()
        assert_equal_on_all_ranks(str(error.value))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train()
    if is_last:
        assert outcomes == ["finite", "finite", {"skip": "discarded", "zero": "zeroed"}[policy], "finite"]
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert_equal_on_all_ranks([p.tolist() for p in net.parameters()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_with_a_scaler_everything_is_as_if_ignored(policy: Any) -> None:
    def trained(policy: Any) -> tuple[list[Tensor], list[float]]:
        net = copy.deepcopy(NET)
        ddp = sl.DistributedDataParallel(net, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.AdamW(net.parameters(), lr=0.01))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(5):
            handle = put(net[0].weight, math.inf) if (dist.get_rank(), step) == (1, 1) else None
            optimizer.zero_grad()
            scaler.scale(ddp(batch(step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if handle is not None:
                handle.remove()
        return [p.detach() for p in net.parameters()], scales

    parameters, scales = trained(policy)
    expected, expected_scales = trained("ignore")
    assert scales == expected_scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
