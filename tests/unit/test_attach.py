"""What an optimizer that is attached does to those that were attached before: it is added, or takes their place."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import syncline as sl
from syncline.optimizers.attached import AttachedOptimizer
from syncline.transport import Transport, run_ranks


class Run:
    """A wrapped module of two layers, and its steps."""

    def __init__(self, transport: Transport, **how: Any) -> None:
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(0.1)
        self.ddp = sl.DistributedDataParallel(self.module, process_group=transport, **how)
        self.rank = transport.rank

    def backward(self) -> None:
        self.ddp(torch.full((2, 3), 1.0 + self.rank)).square().mean().backward()

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        self.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def attached(self) -> str:
        return str(self.ddp.contract["optimizer"].size)


HOW: list[dict[str, Any]] = [{}, {"strategy": sl.LocalSGD(2)}, {"sharded": True}]


@pytest.mark.parametrize("how", HOW, ids=["every step", "LocalSGD", "sharded"])
def test_an_optimizer_made_anew_takes_the_place_of_the_former(how: dict[str, Any]) -> None:
    def program(t: Transport) -> None:
        run = Run(t, **how)
        for _ in range(4):  # as the cell of a notebook
            optimizer = run.ddp.attach(AdamW(run.ddp.parameters(), lr=0.1))
            former = weakref.ref(optimizer)
            run.step(optimizer)
            run.step(optimizer)
            assert run.attached().count("AdamW") == 1
        named = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        with pytest.raises(sl.SynclineError, match="this AdamW was replaced"):
            optimizer.step()
        run.step(named)
        assert "AdamW" not in run.attached()
        del optimizer
        assert former() is None, "its state would stay in memory until the garbage collector comes"

    gc.disable()
    try:
        run_ranks(2, program)
    finally:
        gc.enable()


def test_the_former_is_not_compared_any_more() -> None:
    def program(t: Transport) -> None:
        run = Run(t)
        former = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        run.step(former)
        optimizer = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        former.param_groups[0]["lr"] = 0.1 * t.rank
        run.step(optimizer)

    run_ranks(2, program)


def test_others_are_added() -> None:
    def program(t: Transport) -> None:
        run = Run(t)
        first, second = run.module[0].parameters(), run.module[1].parameters()
        optimizers = [run.ddp.attach(SGD(first, lr=0.1)), run.ddp.attach(AdamW(second, lr=0.1))]
        run.step(*optimizers)
        assert run.attached() == "SGD, AdamW"
        # One for all of them takes the place of both.
        run.step(run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1)))
        assert run.attached() == "SGD"

    run_ranks(2, program)


@pytest.mark.parametrize("how", HOW, ids=["every step", "LocalSGD", "sharded"])
def test_where_it_is_not_clear_it_has_to_be_said(how: dict[str, Any]) -> None:
    def program(t: Transport) -> None:
        run = Run(t, **how)
        first = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        head = AdamW(run.module[1].parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"has 2 of the 4 parameters of the SGD.*replace=True"):
            run.ddp.attach(head)
        run.step(first)
        run.ddp.attach(head, replace=True)
        run.step(head)
        assert "SGD" not in run.attached()
        with pytest.raises(sl.SynclineError, match="this SGD was replaced"):
            first.step()

    run_ranks(2, program)


def test_two_may_step_the_same_parameters_if_that_is_said() -> None:
    def program(t: Transport) -> None:
        run = Run(t)
        optimizers = [run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1)) for _ in range(1)]
        optimizers.append(run.ddp.attach(AdamW(run.ddp.parameters(), lr=0.1), replace=False))
        run.step(*optimizers)
        assert run.attached() == "SGD, AdamW"
        optimizers[0].param_groups[0]["lr"] += t.rank
        with pytest.raises(sl.errors.ContractMismatch, match="lr of optimizer 0"):
            run.backward()

    run_ranks(2, program)


def test_a_sharded_parameter_is_stepped_by_one_optimizer() -> None:
    def program(t: Transport) -> None:
        run = Run(t, sharded=True)
        first = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="cannot be stepped by two attached optimizers"):
            run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1), replace=False)
        run.step(first)

    run_ranks(2, program)


@pytest.mark.parametrize("elementwise", [True, False])
def test_sharded_steps_after_a_replacement_are_those_of_the_new_one(*, elementwise: bool) -> None:
    def program(t: Transport) -> None:
        run, plain = Run(t, sharded=True), Run(t)
        for _ in range(2):
            for one in (run, plain):
                sharded = one is run
                optimizer = one.ddp.attach(
                    AdamW(one.ddp.parameters(), lr=0.1), elementwise=elementwise if sharded else None
                )
                one.step(optimizer)
                one.step(optimizer)
        for mine, theirs in zip(run.module.parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    run_ranks(2, program)


@pytest.mark.parametrize("scheduled", [False, True])
def test_optimizers_may_take_turns_as_often_as_they_like(*, scheduled: bool) -> None:
    def program(t: Transport) -> None:
        run = Run(t)
        optimizers = [SGD(run.ddp.parameters(), lr=0.01), AdamW(run.ddp.parameters(), lr=0.01)]
        schedulers = []
        depths = []
        for turn in range(6):
            optimizer = run.ddp.attach(optimizers[turn % 2])
            if scheduled and turn < 2:
                schedulers.append(StepLR(optimizer, 1, gamma=1.0))
            run.step(optimizer)
            depths.append(_depth(optimizer.step))
            with pytest.raises(sl.SynclineError, match="was replaced"):
                run.ddp.attach(optimizers[turn % 2 - 1])
                optimizers[turn % 2].step()
        assert depths[-1] == depths[2]

    run_ranks(2, program)


def _depth(step: Any) -> int:
    depth = 0
    while step is not None:
        depth += 1
        link = getattr(step, "_syncline_link", None)
        step = None if link is None else link.inner
    return depth


def test_replace_is_yes_or_no() -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(TypeError, match="expected replace to be True or False, got 'yes'"):
        ddp.attach(SGD(ddp.parameters(), lr=0.1), replace="yes")  # type: ignore[arg-type]


def test_the_step_of_an_optimizer_outlives_its_wrapper() -> None:
    module = nn.Linear(2, 1)
    ddp = sl.DistributedDataParallel(module)
    optimizer = ddp.attach(SGD(module.parameters(), lr=1.0))
    del ddp
    gc.collect()
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, before - 1)


# ---------------------------------------------------------------------- a closure, which runs backward inside the step


@pytest.mark.parametrize(
    "how", [*HOW, {"on_nonfinite": "skip"}], ids=["every step", "LocalSGD", "sharded", "skip"]
)
def test_gradients_are_checked_when_the_closure_has_computed_them(how: dict[str, Any]) -> None:
    def program(t: Transport, *, with_closure: bool) -> list[torch.Tensor]:
        run = Run(t, **how)
        optimizer = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))
        schedule = StepLR(optimizer, 1)
        for _ in range(3):
            with run.ddp.no_sync():
                run.backward()
            if with_closure:
                optimizer.step(closure=run.backward)  # the last backward before this call ran under no_sync
            else:
                run.step(optimizer)
            schedule.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in run.ddp.parameters()]

    plain, closed = (run_ranks(2, lambda t, w=w: program(t, with_closure=w)) for w in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], closed[1], strict=True))


def test_a_closure_under_no_sync_leaves_gradients_unreduced() -> None:
    def program(t: Transport) -> None:
        run = Run(t)
        optimizer = run.ddp.attach(SGD(run.ddp.parameters(), lr=0.1))

        def closure() -> None:
            with run.ddp.no_sync():
                run.backward()

        with pytest.raises(sl.SynclineError, match="the last backward, or its forward, ran under no_sync"):
            optimizer.step(closure)

    run_ranks(2, program)


def test_a_closure_that_is_called_again_computes_gradients_again() -> None:
    def program(t: Transport) -> int:
        run = Run(t)
        optimizer = run.ddp.attach(torch.optim.LBFGS(run.ddp.parameters(), max_iter=3))
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = run.ddp(torch.full((2, 3), 1.0 + run.rank)).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        assert optimizer.step(closure).item() == losses[0]
        return len(losses)

    assert min(run_ranks(2, program)) > 1


def test_a_step_whose_later_hook_fails_is_counted() -> None:
    """Or `sl.steps` would make it twice, if the hook has noticed the loss of a rank."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    attached = AttachedOptimizer(optimizer, before_step=lambda _: None)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    weight.grad = torch.ones(1)
    before = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert (attached.num_steps, weight.item()) == (0, 1.0)
    before.remove()
    optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert (attached.num_steps, weight.item()) == (1, 0.5)
