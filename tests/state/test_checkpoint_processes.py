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
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_models_of_different_shapes_are_refused_and_nothing_is_left(kind: str) -> None:
    group, directory = transport(kind), common_directory()
    state = sl.TrainState(model=nn.Linear(2, 2 + dist.get_rank()))
    with sl.Checkpointer(directory, group=group) as checkpointer:
        with pytest.raises(sl.errors.ContractMismatch, match=r"model\.weight"):
            checkpointer.save(state, step=1)
        assert list(Path(directory).iterdir()) == []
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)


class Refuses:
    """Loaded last, and not on the last rank."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank():
            raise ValueError("not mine")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_a_load_that_fails_on_one_rank_changes_no_shared_parameter(kind: str) -> None:
    group, directory = transport(kind), common_directory()
    ddp, optimizer = run(group, sharded=True)
    state = sl.TrainState(model=ddp, optimizer=optimizer, last=Refuses())
    step(ddp, optimizer)
    with sl.Checkpointer(directory, group=group) as checkpointer:
        checkpointer.save(state, step=1)
        step(ddp, optimizer)
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        moments = optimizer.state_dict()["state"]
        with pytest.raises((ValueError, sl.SynclineError), match="not mine"):
            checkpointer.load(state)
    for parameter, then in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(parameter, then)
    now = optimizer.state_dict()["state"]
    for index, one in moments.items():
        assert all(torch.equal(now[index][key], value) for key, value in one.items())
    step(ddp, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
