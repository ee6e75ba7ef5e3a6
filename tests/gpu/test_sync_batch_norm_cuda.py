"""SyncBatchNorm and pooled buffers on CUDA; ranks are threads over one GPU. Skipped where there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.buffers.policies import BufferSync
from syncline.transport import Transport, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 1), (0, 3)], ids=str)
def test_two_ranks_compute_what_one_process_computes(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, 4, 5, generator=g).to("cuda", dtype) for n in sizes]
    dys = [torch.randn(n, 3, 4, 5, generator=g).to("cuda", dtype) for n in sizes]
    layer = nn.BatchNorm2d(3, device="cuda", dtype=dtype)

    def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
        x = x.clone().requires_grad_()
        y = module(x)
        y.backward(dy)
        return [y.detach(), x.grad, module.weight.grad, module.bias.grad, *module.buffers()]

    def rank(t: Transport) -> list[Any]:
        module = sl.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer), t)
        return run(module, xs[t.rank], dys[t.rank])

    first, second = run_ranks(2, rank)
    alone = run(copy.deepcopy(layer), torch.cat(xs), torch.cat(dys))
    combine = [torch.cat, torch.cat, sum, sum, *[lambda pair: pair[0]] * 3]
    rtol, atol = (1e-5, 5e-6) if dtype is torch.float32 else (1e-12, 1e-13)
    for how, mine, other, expected in zip(combine, first, second, alone, strict=True):
        torch.testing.assert_close(how([mine, other]), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_like_half_inputs_the_layer_stays_float32(dtype: torch.dtype) -> None:
    def rank(t: Transport) -> Any:
        layer = sl.nn.SyncBatchNorm(3, process_group=t, device="cuda")
        x = torch.randn(8, 3, 4, 4, device="cuda", dtype=dtype, requires_grad=True)
        y = layer(x.to(memory_format=torch.channels_last))
        y.float().square().sum().backward()
        return y.dtype, x.grad.dtype, layer.weight.grad.dtype

    assert run_ranks(2, rank) == [(dtype, dtype, torch.float32)] * 2


def test_running_statistics_are_pooled_on_the_device() -> None:
    def rank(t: Transport) -> list[Any]:
        layer = nn.BatchNorm1d(2, device="cuda")
        layer.running_mean.fill_(2.0 * t.rank)
        layer.num_batches_tracked.fill_(t.rank)
        sync = BufferSync("average")
        sync.use(layer, t, t)
        sync.sync()
        return [b.tolist() for b in layer.buffers()]

    assert run_ranks(2, rank) == [[[1.0, 1.0], [2.0, 2.0], 1]] * 2
