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
