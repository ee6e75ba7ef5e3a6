"""Wrappers and verbs inside of transforms of torch.func, and under other states that a program can set around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import syncline as sl
from support.cases import case
from syncline.transport import ThreadGroup


class Scaled(nn.Linear):
    """A layer with buffers, which are synchronized before each forward."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.full((2,), 2.0 + dist.get_rank()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.scale).tanh()


def transformed(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return [
        torch.func.vmap(function)(x),
        torch.func.vmap(torch.func.jacrev(function))(x),
        torch.func.grad(lambda row: function(row).sum())(x[0]),
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_buffers_are_synchronized_outside_of_the_transform(transport: str) -> None:
    sl.init(transport=transport)
    policies: list[tuple[Any, float]] = [("broadcast", 5.0), ("average", 5.5)]
    for buffers, expected in policies:
        ddp = sl.DistributedDataParallel(Scaled(), buffers=buffers)
        x = torch.arange(6.0).view(3, 2) + dist.get_rank()
        found = transformed(ddp, x)
        for mine, bare in zip(found, transformed(ddp.module, x), strict=True):
            assert torch.equal(mine, bare)
        with torch.no_grad():
            ddp.module.scale.fill_(5.0 + dist.get_rank())
        jacobian = torch.func.vmap(torch.func.jacrev(ddp))(x)
        assert ddp.module.scale.tolist() == [expected] * 2
        jacobian.square().mean().backward()


@pytest.mark.ranks(2)
def test_a_forward_under_no_sync_inside_of_a_transform_makes_its_backward_local() -> None:
    ddp = sl.DistributedDataParallel(Scaled())
    x = torch.arange(6.0).view(3, 2) + dist.get_rank()
    for number in range(3):
        with ddp.no_sync():
            found = transformed(ddp, x)[number]
        found.square().sum().backward()
        loss = transformed(ddp.module, x)[number].square().sum()
        (local,) = torch.autograd.grad(loss, ddp.module.weight)
        assert torch.equal(ddp.module.weight.grad, local)
        ddp.zero_grad()


@pytest.mark.ranks(2)
def test_a_verb_inside_of_a_transform_is_an_ordinary_call() -> None:
    sl.init(transport="shm")
    outside = torch.full((2,), float(dist.get_rank()))

    def function(x: Tensor) -> Tensor:
        sl.average_(outside)
        return x * outside

    assert torch.func.vmap(function)(torch.ones(3, 2)).tolist() == [[0.5, 0.5]] * 3


def test_a_tensor_of_a_transform_is_refused() -> None:
    t = ThreadGroup(1).transport(0)
    with pytest.raises(ValueError, match=r"transform of torch.func .* outside of the transform"):
        torch.func.vmap(lambda x: sl.average_(x, group=t))(torch.ones(3, 2))


class _Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function mode": _Passing,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.ranks(2)
def test_internal_work_does_not_depend_on_the_state_of_the_program() -> None:
    sl.init(transport="shm")
    for state in STATES:
        torch.set_default_dtype(torch.float64 if state == "default device" else torch.float32)
        with case(state):
            work_in(state)


def work_in(state: str) -> None:
    rank = dist.get_rank()
    net = Scaled().float()
    ddp = sl.DistributedDataParallel(net, compression=sl.compression.PowerSGD(1))
    x = torch.ones(3, 2, dtype=torch.float32) + rank
    value = torch.full((3,), float(rank), dtype=torch.float32)
    with STATES[state]():
        sl.broadcast_(net)
        output = ddp(x)
        sl.average_(value)
        gathered = sl.gather(value)
        mean = sl.mean(float(rank))
        sl.check_replicas(net)
    if state != "inference mode":
        with STATES[state]():
            output.float().sum().backward()
        assert net.weight.grad.isfinite().all()
    assert (value.tolist(), mean) == ([0.5] * 3, 0.5)
    assert gathered.tolist() == [0.5] * 6
