"""Checkpoints of real processes: shares, over one copy of the parameters or one on each rank; and what is closed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from support.cases import case
from support.values import exact
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport

Trained = tuple[sl.DistributedDataParallel, torch.optim.Optimizer]


KINDS = ("auto", "gloo")


@contextlib.contextmanager
def sending_by(kind: str) -> Iterator[tuple[Transport, str]]:
    """What processes send with, and a directory that all of them have meanwhile."""
    group = C10dTransport(timeout_seconds=60) if kind == "gloo" else transport_of()
    told = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    with case(kind):
        yield group, told[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(told[0])


def run(group: Transport, *, sharded: bool) -> Trained:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3))
    ddp = sl.DistributedDataParallel(module, process_group=group, sharded=sharded)
    return ddp, ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1, foreach=False))


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(4, 5)).square().mean().backward()
    optimizer.step()


@pytest.mark.ranks(3)
def test_shares_are_saved_beside_training_and_loaded_by_whom_they_are_not_of() -> None:
    for kind in KINDS:
        with sending_by(kind) as (group, directory):
            ddp, optimizer = run(group, sharded=True)
            with sl.Checkpointer(directory, group=group) as checkpointer:
                for number in range(3):
                    step(ddp, optimizer)
                    checkpointer.save(sl.TrainState(model=ddp, optimizer=optimizer), number, blocking=False)
            expected = exact(optimizer.state_dict()["state"])
            step(ddp, optimizer)  # a lane that was closed takes nothing with it
            (newest,) = Path(directory).glob("save-*-step-2")
            assert f"rank-{dist.get_rank()}.safetensors" in {path.name for path in newest.iterdir()}
            for sharded in (False, True):
                again, other = run(group, sharded=sharded)
                with sl.Checkpointer(directory, group=group) as checkpointer:
                    assert checkpointer.load(sl.TrainState(model=again, optimizer=other)) == 2
                assert exact(other.state_dict()["state"]) == expected
                step(again, other)


class Refuses:
    """Loaded last, and not on the last rank."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank():
            raise ValueError("not mine")


@pytest.mark.ranks(2)
def test_a_load_that_fails_on_one_rank_changes_no_shared_parameter() -> None:
    for kind in KINDS:
        with sending_by(kind) as (group, directory):
            ddp, optimizer = run(group, sharded=True)
            state = sl.TrainState(model=ddp, optimizer=optimizer, last=Refuses())
            step(ddp, optimizer)
            with sl.Checkpointer(directory, group=group) as checkpointer:
                checkpointer.save(state, step=1)
                step(ddp, optimizer)
                before = exact((ddp.module.state_dict(), optimizer.state_dict()["state"]))
                with pytest.raises((ValueError, sl.SynclineError), match="not mine"):
                    checkpointer.load(state)
            assert exact((ddp.module.state_dict(), optimizer.state_dict()["state"])) == before
            step(ddp, optimizer)
