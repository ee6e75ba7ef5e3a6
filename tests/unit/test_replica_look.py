"""The default look at the replicas: what it warns of, when, and what it leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import syncline as sl
from support.inside import as_if_on_a_device, replica_of
from syncline.testing import run_ranks
from syncline.transport.base import Transport


class ActNorm(nn.Module):
    """A layer that computes its scale from the first batch, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self._is_initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_initialized:
            self._is_initialized = True
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
        return x * self.scale


def net(first: nn.Module | None = None) -> nn.Sequential:
    module = nn.Sequential(first or nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    return module


def batch(t: Transport, step: int) -> Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(100 * t.rank + step))


def heard(
    size: int,
    module: Callable[[], nn.Module],
    num_steps: int,
    between: Callable[[Any, Transport, int], object] = lambda ddp, t, step: None,
    **arguments: Any,
) -> list[str]:
    """Train some steps, and return the warnings of all ranks."""

    def rank(t: Transport) -> None:
        ddp: Any = sl.DistributedDataParallel(module(), process_group=t, **arguments)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(1, num_steps + 1):
            between(ddp, t, step)
            optimizer.zero_grad()
            ddp(batch(t, step)).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(size, rank)
    return [str(one.message) for one in found]


def test_what_a_rank_computes_from_its_first_batch_is_named_on_every_rank_in_the_first_step() -> None:
    def forward(ddp: Any, t: Transport, step: int) -> None:
        if step == 1:
            ddp(batch(t, 0))

    one, other = heard(2, lambda: net(ActNorm()), 3)
    assert one == other
    assert one.startswith("Sequential, step 1: expected equal parameters on all ranks, but 1 of 3 ")
    assert "\n  0.scale  rank 0 | rank 1\nThey were never compared before." in one
    assert "sl.broadcast_(ddp.module)" in one
    texts = heard(2, lambda: net(ActNorm()), 1, forward)  # with another forward before the first backward
    assert ["  0.scale  rank 0 | rank 1" in text for text in texts if "expected equal" in text] == [True] * 2


def test_a_write_on_one_rank_is_found_in_the_next_step_that_looks() -> None:
    def write(ddp: Any, t: Transport, step: int) -> None:
        if step == 6 and t.rank == 1:
            with torch.no_grad():
                ddp.module[1].bias.add_(1.0)

    first, *others = heard(3, net, 20, write)
    assert others == [first] * 2
    assert first.startswith("Sequential, step 8:")
    assert "  1.bias  ranks 0, 2 | rank 1\nThey were equal in step 4." in first


@pytest.mark.parametrize("arguments", [{"replica_check": None}, {"ignore": ["0.scale"]}], ids=str)
def test_what_may_differ_is_left_alone(arguments: dict[str, Any]) -> None:
    assert not heard(2, lambda: net(ActNorm()), 3, **arguments)


def test_parameters_that_differ_for_a_part_of_each_step_are_left_alone() -> None:
    """As in sharpness-aware minimization: each rank steps uphill by its own gradients, and back after the backward."""

    def climb(ddp: Any, t: Transport, step: int) -> None:
        with ddp.no_sync():
            ddp(batch(t, step)).square().mean().backward()
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        ddp.zero_grad()
        ddp(batch(t, step)).square().mean().backward()
        with torch.no_grad():
            for parameter, value in zip(ddp.parameters(), before, strict=True):
                parameter.copy_(value)

    assert not heard(2, net, 6, climb)


def test_other_parameters_that_differ_at_the_backward_than_at_the_forward_are_left_alone() -> None:
    def differ(ddp: Any, t: Transport, step: int) -> None:
        for parameter in (ddp.module[0].weight, ddp.module[1].bias):
            before = parameter.detach().clone()
            parameter.data.add_(t.rank)
            output = ddp(batch(t, step))
            if parameter is ddp.module[1].bias:
                output.square().mean().backward()
            parameter.data.copy_(before)

    assert not [text for text in heard(2, net, 2, differ) if "expected equal parameters" in text]


def test_a_forward_on_one_rank_alone_before_all_ranks_write_is_left_alone() -> None:
    def look_and_write(ddp: Any, t: Transport, step: int) -> None:
        if t.rank:
            ddp.module(batch(t, step))
            ddp(batch(t, step))
        with torch.no_grad():
            ddp.module[0].weight.add_(0.25)

    texts = heard(2, net, 6, look_and_write)
    assert not [text for text in texts if "expected equal parameters" in text]


class Manifold(nn.Parameter):
    """As libraries have them."""


def of_a_subclass() -> nn.Module:
    module = net()
    module[1].bias = Manifold(module[1].bias.detach())
    return module


def mean(t: Transport, bucket: Any) -> torch.futures.Future[Tensor]:
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    t.all_reduce(bucket.buffer(), "mean").wait()
    found.set_result(bucket.buffer())
    return found


@pytest.mark.parametrize(("module", "hook"), [(of_a_subclass, None), (net, mean), (net, noop_hook)])
def test_a_write_is_also_found_under_communication_hooks_that_average(
    module: Callable[[], nn.Module], hook: Any
) -> None:
    def write(ddp: Any, t: Transport, step: int) -> None:
        if step == 1 and hook is not None:
            ddp.register_comm_hook(t, hook)
        if step == 3 and t.rank == 1:
            with torch.no_grad():
                ddp.module[1].bias.add_(1.0)

    texts = heard(2, module, 5, write)
    assert ["1.bias  rank 0 | rank 1" in text for text in texts] == [True] * (0 if hook is noop_hook else 2)


@as_if_on_a_device()
def test_hashes_of_an_accelerator_are_compared_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are negative there, and the accelerator of rank 1 is a step late."""
    num_asked = 0

    def is_there(late: object) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 1

    monkeypatch.setattr("syncline.gradients.riders.finite.LateResult.is_there", property(is_there))
    one, other = heard(2, lambda: net(ActNorm()), 4)
    assert one == other
    assert "  0.scale  rank 0 | rank 1\nThey were never compared before." in one


def test_equal_replicas_are_compared_in_few_steps_and_a_batch_that_is_run_twice_counts_once() -> None:
    """A first backward fails before anything is sent, on one rank in every second step."""

    def rank(t: Transport) -> list[int]:
        ddp: Any = sl.DistributedDataParallel(net(), process_group=t)
        look, steps = replica_of(ddp).gradients.riders.look, []

        def fail(_: Tensor) -> None:
            raise ValueError("out of memory")

        for step in range(1, 20):
            ddp.zero_grad()
            if t.rank and step % 2:
                handle = ddp.module[0].register_forward_hook(
                    lambda *given: given[2].register_hook(fail) and None
                )
                with pytest.raises(ValueError, match="out of memory"):
                    ddp(batch(t, step)).sum().backward()
                handle.remove()
            ddp(batch(t, step)).sum().backward()
            if look._equal_in == step:  # this shows when a rank looks
                steps.append(step)
        return steps

    assert run_ranks(2, rank) == [[1, 2, 4, 8, 16]] * 2
