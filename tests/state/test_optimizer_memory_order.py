"""What an optimizer remembers lies as its parameters do: fused kernels go through both side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
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


class Masters(torch.optim.SGD):
    """The same, whose parameters may be spans of several."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
            state["master"].sub_(parameter.grad.float(), alpha=0.01)
            parameter.data.copy_(state["master"])


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("of_torch", [True, False])
def test_nor_is_that_of_a_sharded_optimizer(tmp_path: Path, *, of_torch: bool, elementwise: bool) -> None:
    def made(t: Transport) -> sl.TrainState:
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
        ddp = sl.DistributedDataParallel(module, process_group=t, sharded=True)
        optimizer = ddp.attach(Masters(ddp.parameters(), lr=0.1), elementwise=elementwise)
        return sl.TrainState(model=ddp, optimizer=optimizer)

    def steps(state: sl.TrainState, rank: int, num: int) -> None:
        for _ in range(num):
            g = torch.Generator().manual_seed(10 * state.step + rank)
            state.named["optimizer"].zero_grad()
            inputs = torch.randn(4, 5, generator=g).bfloat16()
            state.named["model"](inputs).square().mean().backward()
            state.named["optimizer"].step()
            state.commit()

    def program(t: Transport) -> None:
        first, second = made(t), made(t)
        steps(first, t.rank, 3)
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
            steps(state, t.rank, 5)
        masters = [state.named["optimizer"].state_dict()["state"] for state in (first, second)]
        for key, one in masters[0].items():
            assert one["master"].dtype == torch.float32
            assert torch.equal(one["master"], masters[1][key]["master"])

    run_ranks(2, program)


def test_a_file_of_torch_keeps_types_too(tmp_path: Path) -> None:
    first, second = with_master(torch.bfloat16), with_master(torch.bfloat16)
    step_in_low_precision(first)
    torch.save(
        {name: one.state_dict() for name, one in first.named.items()} | {"step": 1}, tmp_path / "old.pt"
    )
    second.load_torch(tmp_path / "old.pt")
    masters = [list(state.named["optimizer"].state.values()) for state in (first, second)]
    for one, other in zip(*masters, strict=True):
        assert other["master"].dtype == torch.float32
        assert torch.equal(one["master"], other["master"])


@pytest.mark.parametrize("sharded", [False, True])
def test_the_state_of_another_optimizer_in_a_file_of_torch_is_refused(
    tmp_path: Path, *, sharded: bool
) -> None:
    def program(t: Transport) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        if t.rank == 0:
            torch.save(content, tmp_path / "old.pt")
        t.barrier().wait()
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, sharded=sharded)
        state = sl.TrainState(model=ddp, optimizer=ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1)))
        before = state.named["model"].module.weight.detach().clone()
        with pytest.raises((ValueError, sl.SynclineError), match="lacks betas, eps, which AdamW needs"):
            state.load_torch(tmp_path / "old.pt", group=t)
        assert torch.equal(state.named["model"].module.weight, before)
        assert state.named["optimizer"].param_groups[0]["lr"] == 0.1

    run_ranks(2, program)


def test_state_of_a_parameter_of_another_type_gets_that(tmp_path: Path) -> None:
    first, second = with_master(torch.float32), with_master(torch.bfloat16)
    step_in_low_precision(first)
    checkpointer = sl.Checkpointer(tmp_path)
    checkpointer.save(first)
    checkpointer.load(second)
    assert {one["master"].dtype for one in second.named["optimizer"].state.values()} == {torch.bfloat16}
