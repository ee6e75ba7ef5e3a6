"""Optimizers, clipping and gradient scaling on our class and on torch's beside it: the same weights come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from support.cases import case
from syncline import DistributedDataParallel as DDP

TorchDDP = torch.nn.parallel.DistributedDataParallel
Wrap = Callable[..., Any]

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (AdamW, {"lr": 0.01}),
}
IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}]


class Net(nn.Module):
    """Large and small gradients, which lie apart in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(6, 150), nn.Linear(150, 150), nn.Linear(150, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(5, 6, generator=generator)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_equal_on_all_ranks(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        of_rank_0 = tensor.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(tensor, of_rank_0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", IMPLEMENTATIONS, ids=["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_ends_with_torchs_weights(name: str, how: dict[str, bool]) -> None:
    kind, options = OPTIMIZERS[name]

    def run(wrap: Wrap, view: bool, to_none: bool, *, attach: bool = False) -> list[Tensor]:
        ddp = wrap(Net(), gradient_as_bucket_view=view)
        optimizer = kind(ddp.parameters(), **options, **how)
        if attach:
            ddp.attach(optimizer)
        for step in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            ddp(batch(step)).square().mean().backward()
            optimizer.step()
        return list(ddp.parameters())

    for setting in product([False, True], repeat=2):
        theirs = run(TorchDDP, *setting)
        with case(setting):
            assert_equal(run(DDP, *setting), theirs)
            assert_equal(run(DDP, *setting, attach=True), theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipped_gradients_and_their_norm_are_torchs(
    norm_type: float, foreach: bool | None, view: bool
) -> None:
    def run(wrap: Wrap) -> list[Tensor]:
        ddp = wrap(Net(), gradient_as_bucket_view=view)
        found = []
        for step in range(3):
            ddp.zero_grad()
            (10.0**step * ddp(batch(step))).square().mean().backward()
            options: dict[str, Any] = {"norm_type": norm_type, "foreach": foreach}
            found += [
                ddp.clip_grad_norm_(0.5, **options)
                if wrap is DDP
                else nn.utils.clip_grad_norm_(ddp.parameters(), 0.5, **options)
            ]
            found += [p.grad.clone() for p in ddp.parameters()]
        return found

    ours = run(DDP)
    assert_equal(ours, run(TorchDDP))
    assert_equal_on_all_ranks(ours)


@pytest.mark.ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_on_both_ranks_if_asked() -> None:
    ddp = DDP(Net(), on_nonfinite="ignore")
    (ddp(batch(0)).sum() * (math.inf if dist.get_rank() else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", [{}, *IMPLEMENTATIONS], ids=["plain", "foreach", "fused"])
def test_where_one_ranks_loss_overflows_both_skip_the_same_step_as_in_torch(
    how: dict[str, bool], view: bool, attach: bool
) -> None:
    def run(wrap: Wrap) -> tuple[list[Tensor], list[float]]:
        ddp = wrap(Net(), gradient_as_bucket_view=view)
        optimizer = AdamW(ddp.parameters(), lr=0.01, **how)
        if attach and wrap is DDP:
            ddp.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales, seen = [], []
        for step in range(4):
            optimizer.zero_grad()
            loss = ddp(batch(step)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                loss = loss * 1e38
            before = [p.detach().clone() for p in ddp.parameters()]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if wrap is DDP:
                ddp.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            is_equal = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert is_equal == (step == 1), "this step is skipped, and no other"
            seen += [p.detach().clone() for p in ddp.parameters()]
        return seen, scales

    ours, scales = run(DDP)
    theirs, their_scales = run(TorchDDP)
    assert scales == their_scales == [4.0, 2.0, 2.0, 2.0]
    assert_equal(ours, theirs)
    assert_equal_on_all_ranks(ours)
