"""Edges of torch's class that public programs use: subclasses, old states, other dtypes of gradients, its name."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline.testing import run_ranks
from syncline.transport.base import Transport

DDP = sl.DistributedDataParallel


class Separate(DDP):
    """It wraps the parts of a module by themselves, as mmengine's MMSeparateDistributedDataParallel does."""

    def __init__(self, module: nn.Module, t: Transport) -> None:
        super(DDP, self).__init__()
        self.module = module
        for name, part in module.named_children():
            setattr(module, name, DDP(part, process_group=t))


@on_threads(2)
def test_a_subclass_may_pass_over_the_constructor_and_wrap_parts_of_its_module(t: Transport) -> None:
    model: Any = Separate(nn.Sequential(OrderedDict(first=nn.Linear(1, 1), last=nn.Linear(1, 1))), t)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.train()
    model.zero_grad()
    model.module(torch.full((1, 1), 1.0 + t.rank)).sum().backward()
    model.load_state_dict(model.state_dict())
    keys = [f"module.{part}.module.{name}" for part in ("first", "last") for name in ("weight", "bias")]
    assert list(model.state_dict()) == keys
    assert model.module.first.module.weight.grad.item() == 1.5


class OldState(nn.Module):
    """Its version 2 saves a scale that is half of that of version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_state_keeps_the_versions_of_its_modules() -> None:
    for is_bare, (version, expected) in product((True, False), ((1, 0.5), (2, 1.0))):
        net = nn.Sequential(OldState())
        state: Any = (net if is_bare else nn.DataParallel(net)).state_dict()
        state._metadata["0" if is_bare else "module.0"]["version"] = version
        ddp: Any = DDP(nn.Sequential(OldState()))
        ddp.load_state_dict(state)
        with case(is_bare, version):
            assert ddp.module[0].scale.item() == expected


class Widened(torch.autograd.Function):
    """The values of a parameter in float32, whose gradients stay float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@on_threads(2)
def test_gradients_wider_than_their_parameter_are_not_rounded(t: Transport) -> None:
    for arguments in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        net: Any = nn.Linear(8, 1, bias=False).bfloat16()
        net.weight.grad_dtype = torch.float32
        ddp = DDP(net, process_group=t, **arguments)
        widened: Any = Widened.apply
        (widened(ddp.module.weight) * (1 + 2.0**-12 * (1 + t.rank))).sum().backward()
        with case(arguments):
            assert float(net.weight.grad[0, 0]) == 1 + 1.5 * 2.0**-12


def is_wrapped(model: nn.Module) -> bool:
    """Ask for the class by its name, as Model-Optimizer does."""
    return type(model) is TorchDDP


def test_the_name_of_torchs_class_can_refer_to_ours() -> None:
    before = TorchDDP
    with sl.replace_torch_ddp():
        assert torch.nn.parallel.DistributedDataParallel is DDP
        assert torch.nn.parallel.distributed.DistributedDataParallel is DDP
        assert is_wrapped(TorchDDP(nn.Linear(1, 1)))
    assert torch.nn.parallel.DistributedDataParallel is before is TorchDDP
    assert not is_wrapped(DDP(nn.Linear(1, 1)))


def test_an_averaged_model_of_one_rank() -> None:
    def rank(t: Transport) -> Any:
        ddp: Any = DDP(nn.Linear(2, 1), process_group=t)
        averaged = AveragedModel(ddp.module) if t.rank == 0 else None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            if averaged is not None:
                averaged.update_parameters(ddp.module)
                averaged(torch.ones(4, 2))
        return ddp.module.weight.sum().item()

    one, other = run_ranks(2, rank)
    assert one == other


@on_threads(2)
def test_a_module_that_replaces_the_wrapped_one_is_trained(t: Transport) -> None:
    ddp: Any = DDP(nn.Linear(1, 1, bias=False), process_group=t)
    new = nn.Linear(1, 1, bias=False)
    nn.init.ones_(new.weight)
    ddp(torch.ones(1, 1)).sum().backward()
    for step, module in ((2, new), (3, nn.Sequential(new))):
        ddp.module = module
        ddp.zero_grad()
        ddp(torch.full((1, 1), float(step + t.rank))).sum().backward()
        assert (new.weight.grad.item(), ddp.last_step.step) == (step + 0.5, step)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module() -> None:
    """Its tables of parameters, buffers and submodules are no dictionaries."""

    def rank(t: Transport, nets: list[Any]) -> list[Tensor]:
        net = nets[t.rank]
        ddp: Any = DDP(net, process_group=t)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * t.rank + step)
            ddp.zero_grad()
            ddp(torch.randn(4, 2, generator=generator)).sum().backward()
        ddp.sync_buffers_()
        return [*(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    for is_whole in (True, False):
        nets: list[Any] = []
        for _ in range(2):  # not on the threads of the ranks, which share the compiler
            first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            whole = nn.Sequential(first if is_whole else torch.jit.script(first), nn.Linear(2, 1))
            nets.append(torch.jit.script(whole) if is_whole else whole)
        one, other = run_ranks(2, partial(rank, nets=nets))
        with case(is_whole):
            assert len(one) == 9
            assert all(map(torch.equal, one, other))


@on_threads(2)
def test_buffers_that_are_never_sent_may_differ(t: Transport) -> None:
    """A memory bank of another size on each rank, and masks that are made when they are needed."""
    banked, lazy = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    banked.register_buffer("bank", torch.zeros(1 + t.rank))
    bank: Any = DDP(banked, process_group=t, broadcast_buffers=False)
    ddp: Any = DDP(lazy, process_group=t)
    for step in range(3):
        lazy.register_buffer("mask", torch.ones(1 + (1 + t.rank) * step), persistent=False)
        ddp.zero_grad()
        ddp(torch.full((1, 1), 1.0 + t.rank)).sum().backward()
        bank(torch.ones(1, 1)).sum().backward()
    assert lazy.weight.grad.item() == 1.5
    assert ddp.contract["buffers"].when == "never: local, added after wrapping"
    assert bank.contract["buffers"].when == "never"


def test_a_mask_that_pruning_adds_is_that_of_rank_0() -> None:
    def rank(t: Transport) -> Any:
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        ddp: Any = DDP(net, process_group=t)
        ddp(torch.randn(4, 4, generator=torch.Generator().manual_seed(t.rank))).sum().backward()
        own = torch.ones(4, 4)
        own[t.rank] = 0
        prune.custom_from_mask(net[0], "weight", own)
        ddp(torch.randn(4, 4, generator=torch.Generator().manual_seed(t.rank))).sum().backward()
        return net[0].weight_mask

    one, other = run_ranks(2, rank)
    assert one[0].sum() == 0
    assert torch.equal(one, other)
