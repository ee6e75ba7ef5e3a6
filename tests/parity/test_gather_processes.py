"""gather on real processes: Gloo, shared memory and a hierarchy of both, and with a module of BatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.test_collectives import can_still_be_used, on_every_engine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline import ContractMismatch
from syncline.transport import Transport


def rows_of_unequal_lengths(t: Transport) -> None:
    for lengths in ([3, 0, 5], [0, 0, 0], [0, 300_000, 7], [70_000] * 3, [6_000_000, 5_999_999, 0]):
        parts = [torch.arange(length, dtype=torch.int32) * (rank + 1) for rank, length in enumerate(lengths)]
        assert torch.equal(sl.gather(parts[t.rank], group=t), torch.cat(parts)), lengths
    wide = [torch.full((4, n), n, dtype=torch.bfloat16) for n in (2, 0, 1)]
    found = sl.gather({"wide": wide[t.rank], "loss": t.rank / 2, "ok": t.rank == 2}, dim=-1, group=t)
    assert torch.equal(found["wide"], torch.cat(wide, 1))
    assert found["loss"].tolist() == [0.0, 0.5, 1.0]
    assert found["ok"].tolist() == [False, False, True]


def objects(t: Transport) -> None:
    mine = [{"prompt": f"{t.rank}", "answer": "a" * 100_000 * t.rank, "raw": b"\x00"}] * t.rank
    assert [len(one) for one in sl.gather(mine, objects=True, group=t)] == [0, 1, 2]
    assert sl.gather(mine, objects=True, group=t)[t.rank] == mine


def differences(t: Transport) -> None:
    with pytest.raises(ContractMismatch, match=r"(?s)rank 2 against ranks 0, 1.*values\.x.*\(\*, 4\)"):
        sl.gather({"x": torch.ones(t.rank, 4 if t.rank == 2 else 3)}, group=t)
    with pytest.raises(TypeError, match=r"rank 1: .* got a str at values"):
        sl.gather("text" if t.rank == 1 else 1.0, group=t)
    can_still_be_used(t)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("program", [rows_of_unequal_lengths, objects, differences])
def test_gather_on_every_engine(program: Any) -> None:
    on_every_engine(program)


def accuracy_of(module: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    module.eval()
    indices, right = [], []
    with torch.no_grad():
        for index, x, y in loader:
            indices.append(index)
            right.append(module(x).argmax(1) == y)
    return {"index": torch.cat(indices), "right": torch.cat(right)}


@pytest.mark.ranks(2)
def test_an_evaluation_on_all_ranks_gives_the_figure_of_one_process() -> None:
    """1003 samples, BatchNorm, numbers of batches 4 and 3, the default group, no `sl.init`."""
    g = torch.Generator().manual_seed(5)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=g)
    x, y = torch.randn(1003, 6, generator=g), torch.randint(0, 4, (1003,), generator=g)
    dataset = TensorDataset(torch.arange(1003), x, y)
    alone = accuracy_of(module, DataLoader(dataset, batch_size=167))["right"]
    ddp = sl.DistributedDataParallel(module)
    sampler = sl.DistributedSampler(dataset, shuffle=True, pad=False)
    mine = accuracy_of(ddp, DataLoader(dataset, batch_size=167, sampler=sampler))
    found = sl.gather(mine)
    assert torch.equal(found["right"][found["index"].argsort()], alone)
    assert sl.mean(mine["right"].double().mean().item(), weight=len(mine["right"])) == pytest.approx(
        alone.double().mean().item(), rel=1e-15
    )
