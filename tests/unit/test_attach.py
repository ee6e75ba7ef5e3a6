"""What an optimizer that is attached does to those that were attached before: it is added, or takes their place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import syncline as sl
from support.cases import case
from support.values import exact
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

    def sgd(self, **how: Any) -> torch.optim.Optimizer:
        return self.ddp.attach(SGD(self.ddp.parameters(), lr=0.1), **how)

    def adamw(self, **how: Any) -> torch.optim.Optimizer:
        return self.ddp.attach(AdamW(self.ddp.parameters(), lr=0.1), **how)

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.ddp(torch.full((2, 3), 1.0 + self.rank)).square().mean()
        loss.backward()
        return loss

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        self.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def attached(self) -> str:
        return str(self.ddp.contract["optimizer"].size)


HOW: list[dict[str, Any]] = [{}, {"strategy": sl.LocalSGD(2)}, {"sharded": True}]


def each_way(program: Callable[[Run], Any]) -> None:
    """Run a program on two ranks with each kind of synchronization."""
    for how in HOW:
        with case(how):
            run_ranks(2, lambda t, how=how: program(Run(t, **how)))  # type: ignore[misc]


def test_an_optimizer_made_anew_takes_the_place_of_the_former() -> None:
    def program(run: Run) -> None:
        for _ in range(4):  # as the cell of a notebook
            optimizer = run.adamw()
            former = weakref.ref(optimizer)
            run.step(optimizer)
            run.step(optimizer)
            assert run.attached().count("AdamW") == 1
        named = run.sgd()
        with pytest.raises(sl.SynclineError, match="this AdamW was replaced"):
            optimizer.step()
        run.step(named)
        assert "AdamW" not in run.attached()
        del optimizer
        assert former() is None, "its state would stay in memory until the garbage collector comes"

    gc.disable()
    try:
        each_way(program)
    finally:
        gc.enable()


def test_the_former_is_not_compared_any_more() -> None:
    def program(run: Run) -> None:
        former = run.sgd()
        run.step(former)
        optimizer = run.sgd()
        former.param_groups[0]["lr"] = 0.1 * run.rank
        run.step(optimizer)

    run_ranks(2, lambda t: program(Run(t)))


def test_others_are_added() -> None:
    def program(run: Run) -> None:
        first, second = run.module[0].parameters(), run.module[1].parameters()
        run.step(run.ddp.attach(SGD(first, lr=0.1)), run.ddp.attach(AdamW(second, lr=0.1)))
        assert run.attached() == "SGD, AdamW"
        run.step(run.sgd())  # one for all of them takes the place of both
        assert run.attached() == "SGD"

    run_ranks(2, lambda t: program(Run(t)))


def test_where_it_is_not_clear_it_has_to_be_said() -> None:
    def program(run: Run) -> None:
        first = run.sgd()
        head = AdamW(run.module[1].parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"has 2 of the 4 parameters of the SGD.*replace=True"):
            run.ddp.attach(head)
        run.step(first)
        run.ddp.attach(head, replace=True)
        run.step(head)
        assert "SGD" not in run.attached()
        with pytest.raises(sl.SynclineError, match="this SGD was replaced"):
            first.step()

    each_way(program)


def test_two_may_step_the_same_parameters_if_that_is_said_and_they_are_not_sharded() -> None:
    def program(run: Run) -> None:
        first, second = run.sgd(), run.adamw(replace=False)
        run.step(first, second)
        assert run.attached() == "SGD, AdamW"
        first.param_groups[0]["lr"] += run.rank
        with pytest.raises(sl.errors.ContractMismatch, match="lr of optimizer 0"):
            run.backward()

    def of_shards(run: Run) -> None:
        first = run.sgd()
        with pytest.raises(ValueError, match="cannot be stepped by two attached optimizers"):
            run.sgd(replace=False)
        run.step(first)

    run_ranks(2, lambda t: program(Run(t)))
    run_ranks(2, lambda t: of_shards(Run(t, sharded=True)))


def test_sharded_steps_after_a_replacement_are_those_of_the_new_one() -> None:
    def program(t: Transport, elementwise: bool) -> None:
        run, plain = Run(t, sharded=True), Run(t)
        for _ in range(2):
            for one, how in ((run, elementwise), (plain, None)):
                optimizer = one.adamw(elementwise=how)
                one.step(optimizer)
                one.step(optimizer)
        for mine, theirs in zip(run.module.parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    for elementwise in (True, False):
        with case(elementwise):
            run_ranks(2, lambda t, how=elementwise: program(t, how))  # type: ignore[misc]


def test_optimizers_may_take_turns_as_often_as_they_like() -> None:
    def program(run: Run, scheduled: bool) -> None:
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

    for scheduled in (False, True):
        with case(scheduled):
            run_ranks(2, lambda t, how=scheduled: program(Run(t), how))  # type: ignore[misc]


def _depth(step: Any) -> int:
    depth = 0
    while step is not None:
        depth += 1
        link = getattr(step, "_syncline_link", None)
        step = None if link is None else link.inner
    return depth


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


def test_gradients_are_checked_when_the_closure_has_computed_them() -> None:
    def stepped(run: Run, *, with_closure: bool) -> Any:
        optimizer = run.sgd()
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
        return exact(list(run.ddp.parameters()))

    hows: list[dict[str, Any]] = [*HOW, {"on_nonfinite": "skip"}]
    for how in hows:
        plain, closed = (
            run_ranks(2, lambda t, how=how, w=w: stepped(Run(t, **how), with_closure=w))  # type: ignore[misc]
            for w in (False, True)
        )
        assert plain == closed, how


def test_a_closure_under_no_sync_leaves_gradients_unreduced() -> None:
    def program(run: Run) -> None:
        def closure() -> torch.Tensor:
            with run.ddp.no_sync():
                return run.backward()

        with pytest.raises(sl.SynclineError, match="the last backward, or its forward, ran under no_sync"):
            run.sgd().step(closure)  # type: ignore[arg-type]

    run_ranks(2, lambda t: program(Run(t)))


def test_a_closure_that_is_called_again_computes_gradients_again() -> None:
    def program(run: Run) -> int:
        optimizer = run.ddp.attach(torch.optim.LBFGS(run.ddp.parameters(), max_iter=3))
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(run.backward())
            return losses[-1]

        assert optimizer.step(closure).item() == losses[0].item()
        return len(losses)

    assert min(run_ranks(2, lambda t: program(Run(t)))) > 1


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
