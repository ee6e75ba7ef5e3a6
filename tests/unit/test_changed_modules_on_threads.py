"""Modules that change after wrapping, and parameters that a further wrapper gets in use. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.testing import run_ranks
from syncline.transport.base import Transport

LARGE = 128
"""The width of a layer whose gradient goes into its bucket by itself."""


def linear(width: int = 1) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    nn.init.eye_(layer.weight)
    return layer


def wrapped(t: Transport, module: nn.Module, **arguments: Any) -> Any:
    return sl.DistributedDataParallel(module, process_group=t, **arguments)


def inputs(t: Transport, width: int = 1) -> Tensor:
    """Gradients of a layer are 1 on rank 0 and 2 on rank 1."""
    return torch.full((1, width), 1.0 + t.rank)


def gradients(*layers: nn.Module) -> list[Any]:
    """The first element of each gradient."""
    return [None if p.grad is None else p.grad.flatten()[0].item() for m in layers for p in m.parameters()]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("width", [1, LARGE])
@pytest.mark.parametrize("as_view", [False, True])
def test_a_wrapper_that_gets_a_parameter_of_another_one_reduces_it_with_that_one(
    as_view: bool, width: int, is_last: bool
) -> None:
    """The first wrapper knows of the parameter only in the backward in which both reduce it."""

    def rank(t: Transport) -> list[list[Any]]:
        own, other, shared = linear(width), linear(width), linear(width)
        shared.requires_grad_(False)
        order = 1 if is_last else -1
        first = wrapped(t, nn.Sequential(*[own, shared][::order]), gradient_as_bucket_view=as_view)
        shared.requires_grad_(True)
        second = wrapped(t, nn.Sequential(*[other, shared][::order]), gradient_as_bucket_view=as_view)
        found = []
        for _ in range(3):
            (first(inputs(t, width)) + second(inputs(t, width))).sum().backward()
            found.append(gradients(own, other, shared))
            for layer in (own, other, shared):
                nn.init.zeros_(layer.weight.grad)
        return found

    assert run_ranks(2, rank) == [[[1.5, 1.5, 3.0]] * 3] * 2


def test_a_module_that_is_put_back_before_a_backward_is_trained() -> None:
    def rank(t: Transport) -> list[Any]:
        layers = [linear(), linear()]
        former = nn.Sequential(*layers)
        ddp = wrapped(t, former)
        ddp.module = nn.Sequential(linear(), linear())
        ddp(inputs(t))
        ddp.module = former
        ddp(inputs(t)).sum().backward()
        return gradients(*layers)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


def test_a_module_with_the_same_parameters_takes_the_place_of_one_that_had_others() -> None:
    def rank(t: Transport) -> list[Any]:
        layers = [linear(), linear()]
        ddp = wrapped(t, nn.Sequential(*layers))
        ddp.module = nn.Sequential(*layers, linear())
        ddp(inputs(t))
        ddp.module = nn.Sequential(*layers)
        ddp(inputs(t)).sum().backward()
        return gradients(*layers)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("has_run", [False, True])
def test_a_layer_that_takes_the_place_of_one_that_was_deleted_is_trained(has_run: bool) -> None:
    """To delete a layer, `nn.Sequential` makes a new table of layers."""

    def rank(t: Transport) -> list[Any]:
        net = nn.Sequential(linear())
        ddp = wrapped(t, net)
        net.append(linear())
        if has_run:
            ddp(inputs(t))
        del net[1]
        if has_run:
            ddp(inputs(t))
        net.append(linear())
        ddp(inputs(t)).sum().backward()
        return gradients(net)

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}], ids=str)
def test_a_module_may_be_converted_and_back_between_two_steps(arguments: dict[str, Any]) -> None:

    def rank(t: Transport) -> list[list[Any]]:
        ddp, found = wrapped(t, nn.Sequential(linear(), linear()), **arguments), []
        for _ in range(3):
            ddp(inputs(t)).sum().backward()
            found.append(gradients(ddp))
            ddp.zero_grad()
            ddp.double().float()
        return found

    assert run_ranks(2, rank) == [[[1.5, 1.5]] * 3] * 2


class Mixed(nn.Module):
    """Each layer has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x.to(self.first.weight.dtype))
        found: Tensor = self.last(hidden.to(self.last.weight.dtype))
        return found


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("name", ["first", "last"])
def test_gradients_of_a_layer_that_is_converted_alone_are_not_rounded(
    name: str, arguments: dict[str, Any]
) -> None:
    def rank(t: Transport) -> list[Any]:
        ddp = wrapped(t, Mixed().bfloat16(), **arguments)
        ddp.module.get_submodule(name).double()
        ddp.module.last.weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
        ddp.module.first.weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
        ddp(inputs(t)).sum().backward()
        return gradients(ddp.module.get_submodule(name))

    assert run_ranks(2, rank) == [[1.5 * (1 + 2**-20)]] * 2


def repeated(ddp: Any, x: Tensor) -> None:
    loss = ddp(x).sum() / 2
    loss.backward(retain_graph=True)
    loss.backward()


def called_directly(ddp: Any, x: Tensor) -> None:
    ddp.module(x).sum().backward()


@pytest.mark.parametrize("step", [repeated, called_directly])
def test_a_wrapper_of_a_larger_module_leaves_backwards_alone_that_bring_it_a_part_of_its_gradients(
    step: Callable[[Any, Tensor], None],
) -> None:
    def rank(t: Transport) -> list[Any]:
        inner = linear()
        ddp = wrapped(t, inner)
        larger = wrapped(t, nn.Sequential(inner, linear()))
        step(ddp, inputs(t))
        return gradients(larger)

    assert run_ranks(2, rank) == [[1.5, None]] * 2
