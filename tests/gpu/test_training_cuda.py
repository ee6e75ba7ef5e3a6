"""What a training run does on a GPU beyond the gradients. Ranks are threads over one device; skipped without one.

TEST_GPU_DEVICE=cpu runs the same programs on the CPU, which shows that the programs themselves are right.
"""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.transport import Transport, run_ranks

DEVICE = os.environ.get("TEST_GPU_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3)).to(DEVICE)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)


def test_a_copy_on_a_side_stream_is_complete_before_the_reduction() -> None:
    if DEVICE != "cuda":
        pytest.skip("needs streams")
    template = network()

    def rank(t: Transport) -> list[Tensor]:
        ddp = sl.DistributedDataParallel(copy.deepcopy(template), process_group=t)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call] # the gradients are late on this stream
            ddp(batch(t.rank, 0)).square().sum().backward()
            return [p.grad.clone() for p in ddp.parameters()]

    first, second = run_ranks(2, rank)
    torch.cuda.synchronize()
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("sharded", [False, True])
def test_autocast_and_a_scaler_skip_the_same_step_on_all_ranks(sharded: bool) -> None:
    template = network()

    def rank(t: Transport) -> tuple[list[float], float]:
        ddp = sl.DistributedDataParallel(
            copy.deepcopy(template), process_group=t, sharded=sharded, gradient_as_bucket_view=not sharded
        )
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = ddp(batch(t.rank, step)).square().mean()
            if (t.rank, step) == (1, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist(), scaler.get_scale()

    first, second = run_ranks(2, rank)
    assert first == second
    assert first[1] == 8.0
    assert all(value == value for value in first[0])


class OnTwoDevices(nn.Module):
    """A module whose second layer is on another device than its first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.second_device = f"{DEVICE}:1" if DEVICE == "cuda" else DEVICE
        self.first = nn.Linear(16, 4).to(DEVICE)
        self.second = nn.Linear(4, 3).to(self.second_device)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second_device))  # type: ignore[no-any-return]


@pytest.mark.parametrize("view", [False, True])
def test_a_module_on_two_devices_is_reduced_on_both(view: bool) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def gradients(net: nn.Module) -> list[Tensor]:
        return [p.grad.cpu().clone() for p in net.parameters()]

    whole = OnTwoDevices()

    def rank(t: Transport) -> list[Tensor]:
        net = copy.deepcopy(whole)
        ddp = sl.DistributedDataParallel(net, process_group=t, gradient_as_bucket_view=view)
        ddp(batch(t.rank, 0)).square().sum().backward()
        return gradients(ddp)

    first, second = run_ranks(2, rank)
    (whole(torch.cat([batch(0, 0), batch(1, 0)])).square().sum() / 2).backward()
    for mine, other, expected in zip(first, second, gradients(whole), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_a_run_is_saved_and_resumed_on_the_device(tmp_path: Path) -> None:
    def program(num_steps: int, folder: Path, load: bool) -> list[float]:
        ddp = sl.DistributedDataParallel(network())
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
        state = sl.TrainState(model=ddp, optimizer=optimizer)
        with sl.Checkpointer(folder, stop_signals=()) as checkpointer:
            if load:
                checkpointer.load(state)
            for step in range(state.step, num_steps):
                optimizer.zero_grad()
                ddp(batch(0, step)).square().mean().backward()
                optimizer.step()
                state.commit()
            checkpointer.save(state)
        assert all(p.device.type == DEVICE for p in ddp.parameters())
        return torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()

    program(2, tmp_path / "run", load=False)
    assert program(4, tmp_path / "run", load=True) == program(4, tmp_path / "whole", load=False)


def test_verbs_take_tensors_of_the_device() -> None:
    def rank(t: Transport) -> Any:
        tensor = torch.full((3,), 1.0 + t.rank, device=DEVICE)
        sl.all_reduce_(tensor, group=t)
        source = torch.full((2,), float(t.rank), device=DEVICE, dtype=torch.float16)
        sl.broadcast_(source, src=1, group=t)
        mean = sl.mean(torch.tensor(float(t.rank), device=DEVICE), group=t)
        return tensor.tolist(), source.tolist(), float(mean)

    assert run_ranks(2, rank) == [([3.0] * 3, [1.0] * 2, 0.5)] * 2


def test_evolution_needs_no_backward_on_the_device() -> None:
    def rank(t: Transport) -> list[float]:
        net = network()
        evolution = sl.EvolutionStrategy(net, sigma=0.1, lr=0.1, population=8, seed=0, group=t)
        x = batch(0, 0)
        for _ in range(2):
            evolution.step(lambda module: module(x).square().mean())
        return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()

    first, second = run_ranks(2, rank)
    assert first == second


def test_training_does_not_keep_memory_of_the_device() -> None:
    if DEVICE != "cuda":
        pytest.skip("needs the memory counter of CUDA")

    def used(num_wrappers: int) -> int:
        for _ in range(num_wrappers):
            ddp = sl.DistributedDataParallel(network())
            ddp(batch(0, 0)).sum().backward()
            del ddp
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = used(2)
    assert used(10) <= before


@pytest.mark.filterwarnings("ignore")
def test_the_shared_memory_backend_refuses_tensors_of_the_device(tmp_path: Path) -> None:
    if DEVICE != "cuda":
        pytest.skip("needs a tensor that is not on the CPU")
    import torch.distributed as dist

    sl.register_backend()
    dist.init_process_group("cpu:syncline", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises((RuntimeError, ValueError), match="cuda"):
            dist.all_reduce(torch.ones(2, device=DEVICE))
    finally:
        dist.destroy_process_group()
