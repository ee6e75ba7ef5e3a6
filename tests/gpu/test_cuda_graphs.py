"""CUDA graphs: the wrapper refuses to be captured, and a module that was captured trains inside the wrapper.

A capture needs a GPU. tests/unit/test_graph_capture.py has the refusal with a fake capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.transport import Transport, run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3)).to("cuda", torch.float64)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 16, generator=generator, dtype=torch.float64).cuda()


def warm(stream: torch.cuda.Stream) -> sl.DistributedDataParallel:
    """Return a wrapper that has run three steps on a side stream, as torch asks for before a capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ddp = sl.DistributedDataParallel(network())
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(0, step)).square().mean().backward()
    torch.cuda.synchronize()
    return ddp


def test_a_captured_forward_of_the_wrapper_is_refused() -> None:
    stream = torch.cuda.Stream()
    ddp, x = warm(stream), batch(0, 3)
    refused = "rank 0, step 4, forward: expected to run outside of the capture of a CUDA graph"
    with (
        pytest.raises(sl.SynclineError, match=refused),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        ddp(x)
    ddp(x).square().mean().backward()
    assert ddp.last_step.step == 4


def test_a_captured_backward_is_refused() -> None:
    stream = torch.cuda.Stream()
    ddp, x = warm(stream), batch(0, 3)
    refused = "rank 0, step 4, backward: expected to run outside of the capture of a CUDA graph"
    with (
        pytest.raises(sl.SynclineError, match=refused),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        ddp.module(x).square().mean().backward()


def test_a_forward_without_gradients_can_be_captured() -> None:
    stream = torch.cuda.Stream()
    ddp, x = warm(stream), batch(0, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        y = ddp(x)
    x.copy_(batch(0, 4))
    graph.replay()
    torch.testing.assert_close(y, ddp.module(x).detach())


def test_a_captured_module_inside_the_wrapper_trains_as_without_graphs() -> None:
    def run(nets: Sequence[nn.Module]) -> list[list[Tensor]]:
        def rank(t: Transport) -> list[Tensor]:
            ddp = sl.DistributedDataParallel(nets[t.rank], process_group=t)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
            for step in range(4):
                optimizer.zero_grad()
                ddp(batch(t.rank, step)).square().mean().backward()
                optimizer.step()
            sl.check_replicas(ddp.module, group=t)
            return [parameter.detach().clone() for parameter in ddp.parameters()]

        return run_ranks(2, rank)

    expected, _ = run([network(), network()])
    graphed, _ = run([torch.cuda.make_graphed_callables(network(), (batch(0, 0),)) for _ in range(2)])
    for mine, other in zip(graphed, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)
