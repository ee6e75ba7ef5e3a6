"""What an optimizer remembers lies as its parameters do: fused kernels go through both side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, fused=True),
}


def made(kind: str, memory_format: torch.memory_format = torch.channels_last) -> sl.TrainState:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).to(memory_format=memory_format)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    return sl.TrainState(model=model, optimizer=FUSED[kind](model.parameters()))


def step(state: sl.TrainState) -> None:
    model, optimizer = state.named["model"], state.named["optimizer"]
    g = torch.Generator().manual_seed(state.step)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 6, 6, generator=g)).square().mean().backward()
    optimizer.step()
    state.commit()


def weights(state: sl.TrainState) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in state.named["model"].parameters()]


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_of_channels_last_weights_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    first, second = made(kind), made(kind)
    checkpointer = sl.Checkpointer(tmp_path)
    for _ in range(3):
        step(first)
    checkpointer.save(first)
    checkpointer.load(second)
    for state in (first, second):
        step(state)
        step(state)
    assert weights(first) == weights(second)


@pytest.mark.parametrize("kind", FUSED)
def test_a_checkpoint_of_torch_may_lie_otherwise(kind: str, tmp_path: Path) -> None:
    first, second = made(kind, torch.contiguous_format), made(kind)
    step(first)
    torch.save(
        {name: one.state_dict() for name, one in first.named.items()} | {"step": 1}, tmp_path / "old.pt"
    )
    second.load_torch(tmp_path / "old.pt")
    for state in (first, second):
        step(state)
    for one, other in zip(weights(first), weights(second), strict=True):
        assert one == pytest.approx(other, abs=1e-3)  # another layout rounds otherwise


class WithMaster(torch.optim.SGD):
    """Keeps float32 copies of weights in bfloat16, and steps those."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
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


def step_in_low_precision(state: sl.TrainState) -> None:
    model, optimizer = state.named["model"], state.named["optimizer"]
    g = torch.Generator().manual_seed(state.step)
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=g).to(model.weight.dtype)).square().mean().backward()
    optimizer.step()
    state.commit()


def test_state_of_more_precision_than_its_parameter_is_not_rounded(tmp_path: Path) -> None:
    first, second = with_master(torch.bfloat16), with_master(torch.bfloat16)
    checkpointer = sl.Checkpointer(tmp_path)
    for _ in range(3):
        step_in_low_precision(first)
    checkpointer.save(first)
    checkpointer.load(second)
    for state in (first, second):
        for _ in range(20):
            step_in_low_precision(state)
    masters = [list(state.named["optimizer"].state.values()) for state in (first, second)]
    for one, other in zip(*masters, strict=True):
        assert one["master"].dtype == other["master"].dtype == torch.float32
        assert torch.equal(one["master"], other["master"])


def test_state_of_a_parameter_of_another_type_gets_that(tmp_path: Path) -> None:
    first, second = with_master(torch.float32), with_master(torch.bfloat16)
    step_in_low_precision(first)
    checkpointer = sl.Checkpointer(tmp_path)
    checkpointer.save(first)
    checkpointer.load(second)
    assert {one["master"].dtype for one in second.named["optimizer"].state.values()} == {torch.bfloat16}
