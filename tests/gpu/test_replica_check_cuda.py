"""Replicas compared on CUDA. Ranks are threads over one device; skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import syncline as sl
from syncline import ReplicaDivergence
from syncline.transport import Transport, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("policy", ["raise", "repair"])
def test_one_bit_on_a_device_is_found(policy: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 5)).cuda()

    def program(t: Transport) -> ReplicaDivergence | None:
        check = sl.ReplicaCheck(every=4, on_divergence=policy)  # type: ignore[arg-type]
        ddp = sl.DistributedDataParallel(copy.deepcopy(net), process_group=t, replica_check=check)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
        for step in range(12):
            if step == 5 and t.rank == 1:
                ddp.module[3].bias.detach().view(torch.int32)[3] ^= 1 << 20
            optimizer.zero_grad()
            try:
                ddp(torch.randn(8, 64, device="cuda")).square().sum().backward()
            except ReplicaDivergence as error:
                return error
            optimizer.step()
        sl.check_replicas(sl.TrainState(model=ddp, optimizer=optimizer), group=t)
        return None

    if policy == "raise":
        error = run_ranks(3, program)[0]
        assert error is not None
        assert (error.tensor, error.elements, error.minority_ranks) == ("3.bias", (3, 3), (1,))
    else:
        with pytest.warns(RuntimeWarning, match="Repaired"):
            assert run_ranks(3, program) == [None] * 3
