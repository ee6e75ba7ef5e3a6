"""What an optimizer remembers lies as its parameters do: fused kernels go through both side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
from support.values import exact
from syncline.transport import Transport, run_ranks

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, fused=True),
}


def made(kind: str, memory_format: torch.memory_format = torch.channels_last) -> sl.TrainState:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).to(memory_format=memory_format)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    return sl.TrainState(model=model, optimizer=FUSED[kind](model.parameters()))


def step(state: sl.TrainState, *shape: int, rank: int = 0) -> None:
    model, optimizer = state.named["model"], state.named["optimizer"]
    g = torch.Generator().manual_seed(10 * state.step + rank)
    optimizer.zero_grad()
    inputs = torch.randn(4, *(shape or (3, 6, 6)), generator=g)
    model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    state.commit()


def write_torch_file(state: sl.TrainState, path: Path) -> None:
    torch.save({name: one.state_dict() for name, one in state.named.items()} | {"step": state.step}, path)


def weights(state: sl.TrainState) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in state.named["model"].parameters()]


def test_a_fused_optimizer_of_channels_last_weights_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for kind in FUSED:
        first, second = made(kind), made(kind)
        checkpointer = sl.Checkpointer(tmp_path / kind)
        for _ in range(3):
            step(first)
        checkpointer.save(first)
        checkpointer.load(second)
        for state in (first, second):
            step(state)
            step(state)
        assert weights(first) == weights(second), kind


def test_a_checkpoint_of_torch_may_lie_otherwise(tmp_path: Path) -> None:
    for kind in FUSED:
        first, second = made(kind, torch.contiguous_format), made(kind)
        step(first)
        write_torch_file(first, tmp_path / kind)
        second.load_torch(tmp_path / kind)
        for state in (first, second):
            step(state)
        for one, other in zip(weights(first), weights(second), strict=True):
            assert one == pytest.approx(other, abs=1e-3), kind  # another layout rounds otherwise


class WithMaster(torch.optim.SGD):
    """Keeps float32 copies of weights in bfloat16, which may be spans of several, and steps those."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
            state["master"].sub_(parameter.grad.float(), alpha=0.01)
            parameter.data.copy_(state["master"])


def with_master(dtype: torch.dtype) -> sl.TrainState:
    model = nn.Linear(5, 3)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    model.to(dtype)
    return sl.TrainState(model=model, optimizer=WithMaster(model.parameters(), lr=0.1))


def test_state_of_more_precision_than_its_parameter_is_not_rounded(tmp_path: Path) -> None:
    def load(state: sl.TrainState, first: sl.TrainState, *, of_torch: bool) -> None:
        if of_torch:
            write_torch_file(first, tmp_path / "old.pt")
            state.load_torch(tmp_path / "old.pt")
        else:
            checkpointer = sl.Checkpointer(tmp_path)
            checkpointer.save(first)
            checkpointer.load(state)

    for of_torch in (False, True):
        first, second = with_master(torch.bfloat16), with_master(torch.bfloat16)
        for _ in range(3):
            step(first, 5)
        load(second, first, of_torch=of_torch)
        for state in (first, second):
            for _ in range(20):
                step(state, 5)
        one, other = (list(state.named["optimizer"].state.values()) for state in (first, second))
        with case(of_torch):
            assert one[0]["master"].dtype == torch.float32
            assert exact(one) == exact(other)
    # But state of a parameter of another type gets that.
    first = with_master(torch.float32)
    step(first, 5)
    load(second, first, of_torch=False)
    assert {one["master"].dtype for one in second.named["optimizer"].state.values()} == {torch.bfloat16}


def test_nor_is_that_of_a_sharded_optimizer(tmp_path: Path) -> None:
    def made(t: Transport, elementwise: bool) -> sl.TrainState:
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
        ddp = sl.DistributedDataParallel(module, process_group=t, sharded=True)
        optimizer = ddp.attach(WithMaster(ddp.parameters(), lr=0.1), elementwise=elementwise)
        return sl.TrainState(model=ddp, optimizer=optimizer)

    def program(t: Transport, of_torch: bool, elementwise: bool) -> None:
        first, second = made(t, elementwise), made(t, elementwise)
        for _ in range(3):
            step(first, 5, rank=t.rank)
        if of_torch:
            content = {"optimizer": first.named["optimizer"].state_dict(), "step": first.step}
            content["model"] = first.named["model"].module.state_dict()
            if t.rank == 0:
                torch.save(content, tmp_path / "old.pt")
            t.barrier().wait()
            second.load_torch(tmp_path / "old.pt", group=t)
        else:
            checkpointer = sl.Checkpointer(tmp_path, group=t)
            checkpointer.save(first)
            checkpointer.load(second)
        for state in (first, second):
            for _ in range(5):
                step(state, 5, rank=t.rank)
        one, other = (state.named["optimizer"].state_dict()["state"] for state in (first, second))
        assert one[0]["master"].dtype == torch.float32
        assert exact(one) == exact(other)

    for of_torch, elementwise in itertools.product((True, False), repeat=2):
        with case(of_torch, elementwise):
            run_ranks(2, lambda t, how=(of_torch, elementwise): program(t, *how))  # type: ignore[misc]


def test_the_state_of_another_optimizer_in_a_file_of_torch_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    write_torch_file(sl.TrainState(model=model, optimizer=sgd), tmp_path / "old.pt")

    def program(t: Transport, sharded: bool) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, sharded=sharded)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
        before = ddp.module.weight.detach().clone()
        with pytest.raises((ValueError, sl.SynclineError), match="lacks betas, eps, which AdamW needs"):
            sl.TrainState(model=ddp, optimizer=optimizer).load_torch(tmp_path / "old.pt", group=t)
        assert torch.equal(ddp.module.weight, before)
        assert optimizer.param_groups[0]["lr"] == 0.1

    for sharded in (False, True):
        with case(sharded):
            run_ranks(2, lambda t, s=sharded: program(t, s))  # type: ignore[misc]
