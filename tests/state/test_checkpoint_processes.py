"""Checkpoints of real processes: shares, over one copy of the parameters or one on each rank; and what is closed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.world import transport_of


def transport(kind: str) -> Transport:
    return C10dTransport(timeout_seconds=60) if kind == "gloo" else transport_of()


def common_directory() -> str:
    told = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    return told[0]


def run(group: Transport, *, sharded: bool) -> tuple[sl.DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    ddp = sl.DistributedDataParallel(
        nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3)), process_group=group, sharded=sharded
    )
    return ddp, ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1, foreach=False))


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(4, 5)).square().mean().backward()
    optimizer.step()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_shares_are_saved_beside_training_and_loaded_by_whom_they_are_not_of(kind: str) -> None:
    group, directory = transport(kind), common_directory()
    rank = dist.get_rank()
    ddp, optimizer = run(group, sharded=True)
    with sl.Checkpointer(directory, group=group) as checkpointer:
        for number in range(3):
            step(ddp, optimizer)
            checkpointer.save(sl.TrainState(model=ddp, optimizer=optimizer), number, blocking=False)
    expected = optimizer.state_dict()
    step(ddp, optimizer)  # a lane that was closed takes nothing with it
    (newest,) = Path(directory).glob("save-*-step-2")
    assert f"rank-{rank}.safetensors" in {path.name for path in newest.iterdir()}
    for sharded in (False, True):
        again, other = run(group, sharded=sharded)
        with sl.Checkpointer(directory, group=group) as checkpointer:
            assert checkpointer.load(sl.TrainState(model=again, optimizer=other)) == 2
        found = other.state_dict()
        for index, state in expected["state"].items():
            for key, value in state.items():
                assert torch.equal(found["state"][index][key], value), (index, key)
        step(again, other)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
