"""The same semantics on CUDA. Skipped where there is none.

One GPU is enough: ranks are threads over the same device, so buckets, hooks, control data and streams are those of
CUDA while the transport is the deterministic one. The c10d test runs alone over NCCL.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 5)).cuda()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap_mb", [None, 1e-4])
def test_two_ranks_average_their_gradients_on_the_device(view: bool, cap_mb: float | None) -> None:
    batches = [torch.randn(8, 256, device="cuda") for _ in range(2)]
    template = model()

    def rank(t: Transport) -> Any:
        import copy

        ddp = DDP(
            copy.deepcopy(template),
            process_group=t,
            gradient_as_bucket_view=view,
            bucket_cap_mb=cap_mb,
            device_ids=[0],
        )
        for _ in range(3):
            ddp.zero_grad()
            ddp(batches[t.rank]).square().sum().backward()
        return [p.grad.clone() for p in ddp.parameters()]

    first, second = run_ranks(2, rank)
    expected = []
    for batch in batches:
        alone = model()
        alone(batch).square().sum().backward()
        expected.append([p.grad for p in alone.parameters()])
    for mine, other, a, b in zip(first, second, *expected, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, (a + b) / 2, rtol=1e-4, atol=1e-4)


def test_item_counts_travel_in_half_precision_on_the_device() -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(nn.Linear(4, 1, dtype=torch.bfloat16, device="cuda"), process_group=t)
        with ddp.normalize_by(4097 + t.rank):
            ddp(torch.zeros(1, 4, dtype=torch.bfloat16, device="cuda")).sum().backward()
        return ddp.last_step.divisor

    assert run_ranks(2, rank) == [8195, 8195]


def test_host_inputs_are_moved_to_the_device() -> None:
    def rank(t: Transport) -> str:
        ddp = DDP(nn.Linear(4, 1).cuda(), device_ids=[0], process_group=t)
        return str(ddp(torch.ones(1, 4)).device)

    assert run_ranks(1, rank) == ["cuda:0"]


def test_nccl_alone(tmp_path: Any) -> None:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        ddp = DDP(model())
        ddp(torch.randn(8, 256, device="cuda")).sum().backward()
        assert all(p.grad is not None for p in ddp.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "strategy",
    [
        sl.LocalSGD(2, warmup=1, optimizer_state=True),
        sl.DiLoCo(2),
        sl.DiLoCo(4, fragments=2, delay=1, compression=sl.compression.Quantize(4)),
        sl.Gossip("exponential"),
        sl.ParameterServer(1),
    ],
    ids=str,
)
def test_strategies_let_replicas_on_the_device_meet(strategy: Any) -> None:
    template = model()

    def rank(t: Transport) -> None:
        import copy

        ddp = DDP(copy.deepcopy(template), process_group=t, strategy=strategy)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator("cuda").manual_seed(10 * step + t.rank)
            ddp(torch.randn(8, 256, device="cuda", generator=generator)).square().mean().backward()
            optimizer.step()
        ddp.sync_parameters_()
        sl.check_replicas(ddp.module, group=t)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "compression",
    [
        sl.compression.Cast(torch.bfloat16),
        sl.compression.Quantize(4),
        sl.compression.TopK(0.1),
        sl.compression.PowerSGD(2),
    ],
    ids=str,
)
def test_gradients_on_the_device_are_encoded(compression: Any) -> None:
    template = model()

    def rank(t: Transport) -> None:
        import copy

        ddp = DDP(copy.deepcopy(template), process_group=t, compression=compression)
        for step in range(3):
            ddp.zero_grad()
            generator = torch.Generator("cuda").manual_seed(10 * step + t.rank)
            ddp(torch.randn(8, 256, device="cuda", generator=generator)).square().mean().backward()
        sl.check_replicas([p.grad for p in ddp.parameters()], group=t)

    run_ranks(2, rank)


def test_verbs_on_the_device() -> None:
    def rank(t: Transport) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
        sl.average_(module, weight=1.0 + t.rank, group=t)
        sl.check_replicas(module, group=t)
        x = torch.full((3,), float(t.rank), device="cuda")
        assert sl.keep_best_(x, score=t.rank, group=t) == 1
        assert x.tolist() == [1.0, 1.0, 1.0]
        module(torch.randn(8, 4, device="cuda")).sum().backward()
        sl.sync_gradients_(module, group=t)
        sl.check_replicas([p.grad for p in module.parameters()], group=t)

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:step 2, backward:RuntimeWarning")
@pytest.mark.parametrize("cap_mb", [None, 1e-4])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_gradients_that_are_not_finite_are_found_on_the_device(
    policy: Any, value: float, cap_mb: float | None
) -> None:
    def rank(t: Transport) -> Any:
        ddp = DDP(model(), process_group=t, bucket_cap_mb=cap_mb, on_nonfinite=policy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        found = []
        for step in range(3):
            optimizer.zero_grad()
            weight = torch.ones(8, 5, device="cuda")
            weight[0, 3] = value if (t.rank, step) == (1, 1) else 1.0
            handle = ddp.module[3].bias.register_hook(lambda g, w=weight: g * w[0])
            with suppress(sl.NonFiniteGradient):
                ddp(torch.randn(8, 256, device="cuda")).square().sum().backward()
                optimizer.step()
            found.append((dict(ddp.last_step.nonfinite.found), ddp.last_step.nonfinite.outcome))
            handle.remove()
        assert all(bool(p.isfinite().all()) for p in ddp.parameters())
        return found

    outcome = {"raise": "raised", "skip": "discarded", "zero": "zeroed"}[policy]
    assert run_ranks(2, rank) == [[({}, "finite"), ({1: ("3.bias",)}, outcome), ({}, "finite")]] * 2
