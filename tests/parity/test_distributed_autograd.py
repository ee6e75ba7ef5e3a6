"""A backward of torch's distributed autograd (over RPC): its context gets the mean, as with torch's class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import DistributedDataParallel as DDP

TorchDDP = torch.nn.parallel.DistributedDataParallel


@contextmanager
def rpc() -> Iterator[None]:
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=dist.get_world_size())
    try:
        yield
    finally:
        rpc.shutdown()


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.EmbeddingBag(10, 3, sparse=sparse, mode="sum")
        self.last = nn.Linear(3, 2)
        if unused:
            self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x))


def context_gradients(ddp: Any, module: Net, num_steps: int = 3) -> list[Tensor]:
    from torch.distributed import autograd

    seen = []
    for step in range(num_steps):
        x = torch.tensor([[dist.get_rank() + step, 3], [step, 1 + 2 * dist.get_rank()]])
        with autograd.context() as context_id:
            autograd.backward(context_id, [ddp(x).square().sum()])
            gradients = autograd.get_gradients(context_id)
            seen += [
                gradients[p].to_dense() if gradients[p].is_sparse else gradients[p].clone()
                for p in (module.embedding.weight, module.last.weight, module.last.bias)
            ]
        assert all(p.grad is None for p in module.parameters())
    return seen


@pytest.mark.filterwarnings("ignore")  # torch's own, about its RPC
@pytest.mark.ranks(2)
def test_a_context_gets_the_mean_as_with_torchs_class() -> None:
    with rpc():
        for sparse in (False, True):
            ours, theirs = Net(sparse=sparse), Net(sparse=sparse)
            got = context_gradients(DDP(ours), ours)
            torch.testing.assert_close(got, context_gradients(TorchDDP(theirs), theirs))
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2)
def test_unused_parameters_are_left_out_where_torchs_class_fails_or_are_the_same_error() -> None:
    from torch.distributed import autograd

    with rpc():
        module, used = Net(unused=True), Net()
        got = context_gradients(DDP(module, find_unused_parameters=True), module)
        torch.testing.assert_close(got, context_gradients(DDP(used), used))
        with autograd.context() as context_id:
            loss = DDP(Net(unused=True))(torch.tensor([[1, 2]])).sum()
            with pytest.raises(
                RuntimeError, match=r"on every rank: unused\.weight"
            ):  # RPC keeps its text only
                autograd.backward(context_id, [loss])
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2)
def test_ordinary_backwards_between_are_ordinary() -> None:
    from torch.distributed import autograd

    with rpc():
        module = nn.Linear(2, 1)
        ddp = DDP(module)
        x = torch.full((1, 2), float(dist.get_rank() + 1))
        ddp(x).sum().backward()
        assert module.weight.grad.tolist() == [[1.5, 1.5]]
        with autograd.context() as context_id:
            autograd.backward(context_id, [ddp(x).sum()])
            assert autograd.get_gradients(context_id)[module.weight].tolist() == [[1.5, 1.5]]
        assert module.weight.grad.tolist() == [[1.5, 1.5]]
        ddp(x).sum().backward()
        assert module.weight.grad.tolist() == [[3.0, 3.0]]
        dist.barrier()
