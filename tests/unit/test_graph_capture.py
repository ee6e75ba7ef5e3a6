"""A step that is captured into a CUDA graph is refused, with a fake capture. tests/gpu captures for real."""

from __future__ import annotations

import pytest
import torch
from fake_devices import SaysCuda
from torch import nn

import syncline as sl
from syncline.transport import Transport, run_ranks


def says_cuda(t: Transport) -> sl.DistributedDataParallel:
    net = nn.Linear(2, 1, bias=False)
    net.weight = nn.Parameter(net.weight.detach().as_subclass(SaysCuda))  # type: ignore[arg-type]
    return sl.DistributedDataParallel(net, process_group=t)


def test_a_captured_step_is_refused_and_the_next_one_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    is_capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])

    def rank(t: Transport) -> object:
        ddp = says_cuda(t)
        x = torch.full((1, 2), float(t.rank))
        t.barrier().wait()
        is_capturing[0] = True
        t.barrier().wait()
        with pytest.raises(sl.SynclineError, match=f"rank {t.rank}, step 1, forward: .* CUDA graph"):
            ddp(x)
        with torch.no_grad():
            ddp(x)  # nothing would be sent
        loss = ddp.module(x).sum()
        with pytest.raises(sl.SynclineError, match=f"rank {t.rank}, step 1, backward: .* CUDA graph"):
            loss.backward()
        t.barrier().wait()
        is_capturing[0] = False
        t.barrier().wait()
        ddp.zero_grad()
        ddp(x).sum().backward()
        return ddp.module.weight.grad.tolist()

    assert run_ranks(2, rank) == [[[0.5, 0.5]]] * 2


def test_a_module_on_the_cpu_beside_a_capture_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def rank(t: Transport) -> object:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=t)
        ddp(torch.full((1, 2), float(t.rank))).sum().backward()
        return ddp.module.weight.grad.tolist()

    assert run_ranks(2, rank) == [[[0.5, 0.5]]] * 2
