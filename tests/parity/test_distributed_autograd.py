"""torch's distributed autograd (RPC) keeps gradients in contexts, out of `.grad`: a wrapper refuses to run there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl


@pytest.mark.filterwarnings("ignore")  # torch's own, about its RPC
@pytest.mark.ranks(2)
def test_a_forward_in_a_context_is_an_error_and_ordinary_steps_go_on() -> None:
    from torch.distributed import autograd, rpc

    rank = dist.get_rank()
    ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
    x = torch.full((1, 2), rank + 1.0)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    try:
        for total in (1.5, 3.0):
            ddp(x).sum().backward()
            assert ddp.module.weight.grad.tolist() == [[total, total]]
            expected = r"step \d: expected a forward outside of torch\.distributed\.autograd\.context"
            with autograd.context(), pytest.raises(sl.SynclineError, match=expected):
                ddp(x)
        dist.barrier()
    finally:
        rpc.shutdown()
