"""What is compared beside the gradients, and how a changed module is noticed: pure logic, no ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cases import case
from syncline.ddp import Inventory
from syncline.gradients import Words
from syncline.gradients.backward import Backward, BackwardState
from syncline.gradients.outputs import Outputs
from syncline.gradients.riders.differences import Forwards, Settings
from syncline.optimizers import AttachedOptimizer
from syncline.transport import ThreadGroup

# ---------------------------------------------------------------------- forwards that wait for a backward


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


def differentiable() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


def test_a_forward_waits_until_a_backward_reaches_one_of_its_tensors() -> None:
    outputs = Outputs()
    output = Output(differentiable(), [differentiable(), torch.ones(1)])
    outputs.watch(output, is_counted=True)
    assert (outputs.num_waiting, outputs.num_open) == (1, 2)
    output.hidden[0].sum().backward(retain_graph=True)
    assert (outputs.num_waiting, outputs.num_open) == (0, 1)
    output.hidden[0].sum().backward()
    assert (outputs.num_waiting, outputs.num_open) == (0, 1), "counted once"
    output.logits.sum().backward()
    assert (outputs.num_waiting, outputs.num_open) == (0, 0)


def test_a_forward_before_the_last_reduction_does_not_count_any_more() -> None:
    outputs = Outputs()
    early = differentiable()
    outputs.watch(early, is_counted=True)
    outputs.reduced()
    outputs.watch(differentiable(), is_counted=True)
    early.sum().backward()
    assert (outputs.num_waiting, outputs.num_open) == (1, 1)


def test_an_output_without_tensors_or_with_too_many_is_not_counted_but_stays_open() -> None:
    for output, num_open in ((torch.ones(2), 1), (None, 1), ("text", 1), ([differentiable()] * 9, 9)):
        outputs = Outputs()
        outputs.watch(output, is_counted=True)
        with case(output):
            assert outputs.num_waiting == 0
            assert outputs.num_open == num_open, "one that no backward is known to reach"


def test_a_view_that_is_changed_in_place_is_still_reached() -> None:
    outputs, output = Outputs(), differentiable()[:1]
    outputs.watch(output, is_counted=True)
    output *= 2
    output.sum().backward()
    assert (outputs.num_waiting, outputs.num_open) == (0, 0)


def test_no_hook_is_left_on_a_leaf() -> None:
    outputs, leaf = Outputs(), torch.ones(2, requires_grad=True)
    outputs.watch([leaf, leaf * 2], is_counted=True)
    assert not leaf._backward_hooks
    assert (outputs.num_waiting, outputs.num_open) == (0, 2)


def test_a_watched_output_can_be_saved_and_copied() -> None:
    outputs = Outputs()
    output = differentiable()
    outputs.watch(output)
    torch.save(output, io.BytesIO())
    copy.copy(output)
    pickle.dumps(output.detach())


def received(of_rank: tuple[int | None, ...], *, rank: int, step: int) -> Words:
    group = ThreadGroup(len(of_rank))
    return Words(of_rank, step, group.transport(rank))


def test_a_difference_in_forwards_is_a_warning_that_comes_once_and_on_rank_0() -> None:
    waiting = (0, 2, None)
    first, second = Forwards(), Forwards()
    with pytest.warns(RuntimeWarning, match=r"step 7.*rank 1 ran forwards.*\(rank 0: 0, rank 1: 2\)"):
        first.receive(received(waiting, rank=0, step=7))
    first.receive(received(waiting, rank=0, step=8))  # warnings are errors here
    second.receive(received(waiting, rank=1, step=7))
    second.receive(received((1, 1, 1), rank=0, step=7))


# ---------------------------------------------------------------------- the fingerprint

REDUCED = Backward(step=1, state=BackwardState.FILLING)


def attached(lr: Any, **options: Any) -> AttachedOptimizer:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, **options)
    return AttachedOptimizer(optimizer, before_step=lambda _: None)


def test_the_fingerprint_changes_with_what_matters() -> None:
    assert Settings().word(REDUCED) == 0, "nothing to tell"
    changes: dict[str, Callable[[torch.optim.Optimizer], object]] = {
        "lr": lambda optimizer: optimizer.param_groups[0].update(lr=0.2),
        "lr in place": lambda optimizer: optimizer.param_groups[0]["lr"].fill_(0.2),
        "switch": lambda optimizer: optimizer.param_groups[0].update(nesterov=True),
        "step": lambda optimizer: optimizer.step(),
    }
    for name, change in changes.items():
        one, other = Settings(), Settings()
        for settings in (one, other):
            lr: Any = torch.tensor(0.1) if name == "lr in place" else 0.1
            settings.optimizers.append(attached(lr, momentum=0.9))
        with case(name):
            assert one.word(REDUCED) == other.word(REDUCED) != 0
            change(other.optimizers[0].optimizer)
            assert one.word(REDUCED) != other.word(REDUCED)
            assert one.facts() != other.facts()


def test_step_stays_a_method_that_schedulers_can_wrap() -> None:
    for scheduler_first in (False, True):
        asked: list[object] = []
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        watched = AttachedOptimizer(optimizer, before_step=asked.append)
        if not scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        with case(scheduler_first):
            assert watched.num_steps == len(asked) == 2
            assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_step_that_is_refused_is_not_counted() -> None:
    def refuse(_: AttachedOptimizer) -> None:
        raise ValueError("no")

    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    watched = AttachedOptimizer(torch.optim.SGD([weight], lr=1.0), before_step=refuse)
    with pytest.raises(ValueError, match="no"):
        watched.optimizer.step()
    assert watched.num_steps == 0
    assert weight.item() == 1.0


# ---------------------------------------------------------------------- the inventory


def net() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential())
    module[0].bias.requires_grad_(False)
    return module


def replace_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(3, 2))


def replace_submodule(module: nn.Sequential) -> None:
    module[1] = nn.BatchNorm1d(3)


def test_what_is_added_removed_replaced_or_unfrozen_is_noticed() -> None:
    changes: list[Callable[[nn.Sequential], object]] = [
        lambda module: module.append(nn.ReLU()),
        lambda module: module[2].append(nn.Linear(1, 1)),
        lambda module: module[0].register_parameter("extra", nn.Parameter(torch.zeros(1))),
        lambda module: module[0].bias.requires_grad_(True),
        lambda module: module.pop(2),
        replace_parameter,
        replace_submodule,
    ]
    for number, change in enumerate(changes):
        module = net()
        inventory = Inventory(module)
        assert not inventory.has_changed()
        change(module)
        with case(f"change {number}"):
            assert inventory.has_changed()


def test_values_and_buffers_are_no_change() -> None:
    module = net()
    inventory = Inventory(module)
    module[1].running_mean = torch.ones(3)
    module[0].register_buffer("extra", torch.zeros(1))
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    module(torch.ones(2, 2)).sum().backward()
    module.eval()
    assert not inventory.has_changed()
