"""Optimizers, clipping and gradient scaling on our class and on torch's beside it: the same weights come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Net, batch
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
OFF_ON = (False, True)
IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_equal_on_all_ranks(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        of_rank_0 = tensor.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(tensor, of_rank_0)


@pytest.mark.ranks(2, timeout=300)
def test_training_ends_with_torchs_weights() -> None:
    def run(
        wrap: Wrap, name: str, how: dict[str, bool], view: bool, to_none: bool, *, attach: bool = False
    ) -> list[Tensor]:
        kind, options = OPTIMIZERS[name]
        ddp = wrap(Net(), gradient_as_bucket_view=view)
        optimizer = kind(ddp.parameters(), **options, **how)
        if attach:
            ddp.attach(optimizer)
        for step in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            ddp(batch(step)).square().mean().backward()
            optimizer.step()
        return list(ddp.parameters())

    for setting in product(OPTIMIZERS, IMPLEMENTATIONS, OFF_ON, OFF_ON):
        theirs = run(TorchDDP, *setting)
        with case(setting):
            assert_equal(run(DDP, *setting), theirs)
            assert_equal(run(DDP, *setting, attach=True), theirs)


def clip_(ddp: Any, max_norm: float, **options: Any) -> Tensor:
    """Ours has a method, which knows of shards; with torch's class programs call the function."""
    if isinstance(ddp, DDP):
        return ddp.clip_grad_norm_(max_norm, **options)
    return nn.utils.clip_grad_norm_(ddp.parameters(), max_norm, **options)


@pytest.mark.ranks(2, timeout=300)
def test_clipped_gradients_and_their_norm_are_torchs() -> None:
    for norm_type, foreach, view in product([1.0, 2.0, math.inf], [None, True, False], OFF_ON):
        options: dict[str, Any] = {"norm_type": norm_type, "foreach": foreach}

        def run(wrap: Wrap, view: bool = view, options: Any = options) -> list[Tensor]:
            ddp = wrap(Net(), gradient_as_bucket_view=view)
            found = []
            for step in range(3):
                ddp.zero_grad()
                (10.0**step * ddp(batch(step))).square().mean().backward()
                found += [clip_(ddp, 0.5, **options), *(p.grad.clone() for p in ddp.parameters())]
            return found

        ours = run(DDP)
        with case(options, view):
            assert_equal(ours, run(TorchDDP))
            assert_equal_on_all_ranks(ours)


@pytest.mark.ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_on_both_ranks_if_asked() -> None:
    ddp = DDP(Net(), on_nonfinite="ignore")
    (ddp(batch(0)).sum() * (math.inf if dist.get_rank() else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.ranks(2, timeout=300)
def test_where_one_ranks_loss_overflows_both_skip_the_same_step_as_in_torch() -> None:
    """Also where autocast computes in bfloat16."""

    def run(
        wrap: Wrap, how: dict[str, bool], *, view: bool, attach: bool, autocast: bool
    ) -> tuple[list[Tensor], list[float]]:
        ddp = wrap(Net(), gradient_as_bucket_view=view)
        optimizer = AdamW(ddp.parameters(), lr=0.01, **how)
        if attach and wrap is DDP:
            ddp.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales, seen = [], []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = ddp(batch(step)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                loss = loss * (math.inf if autocast else 1e38)
            before = [p.detach().clone() for p in ddp.parameters()]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_(ddp, 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            is_equal = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert is_equal == (step == 1), "this step is skipped, and no other"
            seen += [p.detach().clone() for p in ddp.parameters()]
        return seen, scales

    for how, view, attach, autocast in product([{}, *IMPLEMENTATIONS], OFF_ON, OFF_ON, OFF_ON):
        options = {"view": view, "attach": attach, "autocast": autocast}
        with case(how, options):
            ours, scales = run(DDP, how, **options)
            theirs, their_scales = run(TorchDDP, how, **options)
            assert scales == their_scales == [4.0, 2.0, 2.0, 2.0]
            assert_equal(ours, theirs)
            assert_equal_on_all_ranks(ours)
