"""Ranks as processes that are asked to stop: over each engine, inside of `join`, beside torch's own wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from syncline.session import transport_of
from syncline.transport import C10dTransport
from syncline.transport.agreement import exchange


def shared(path: Path) -> str:
    """Rank 0's folder, on all ranks."""
    rows = [""]
    rows[0] = str(path)
    dist.broadcast_object_list(rows, src=0)
    return rows[0]


def until_stopped(state: sl.TrainState, checkpointer: sl.Checkpointer, step: Any, limit: int = 20) -> int:
    with pytest.raises(SystemExit):
        for _ in range(limit):
            if state.step == 3 and dist.get_rank() == 1:
                checkpointer.ask_to_stop()
            step()
            state.commit()
            checkpointer.stop_if_asked(state)
    return state.step


@pytest.mark.ranks(3)
@pytest.mark.parametrize("engine", ["auto", "c10d"])
@pytest.mark.parametrize(
    ("wrapping", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({"sharded": True}, torch.float32),
        ({"strategy": sl.LocalSGD(4)}, torch.float32),
        ({"strategy": sl.Gossip("ring")}, torch.float32),
    ],
    ids=str,
)
def test_all_ranks_stop_after_the_step_under_way(
    engine: str, wrapping: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    group: Any = transport_of(None) if engine == "auto" else C10dTransport(dist.group.WORLD)
    ddp = sl.DistributedDataParallel(nn.Linear(4, 1).to(dtype), process_group=group, **wrapping)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    directory = shared(tmp_path)
    checkpointer = sl.Checkpointer(directory, group=group, stop_signals=())

    def step() -> None:
        ddp(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert until_stopped(state, checkpointer, step) == 4
    assert [path.name for path in Path(directory).iterdir()] == ["save-000001-step-4"]


@pytest.mark.ranks(2)
def test_torchs_own_wrapper(tmp_path: Path) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    state = sl.TrainState(model=ddp)
    checkpointer = sl.Checkpointer(shared(tmp_path), stop_signals=())
    assert until_stopped(state, checkpointer, lambda: ddp(torch.ones(2, 4)).sum().backward()) == 4


@pytest.mark.ranks(2)
def test_where_a_rank_has_no_inputs_left_the_stop_waits_for_the_end_of_join(tmp_path: Path) -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(4, 1))
    state = sl.TrainState(model=ddp)
    checkpointer = sl.Checkpointer(shared(tmp_path), stop_signals=())
    rank = dist.get_rank()

    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()
        state.commit()
        checkpointer.stop_if_asked(state)

    with ddp.join():
        for _ in range(2 + 3 * rank):
            if rank == 1 and state.step == 3:
                checkpointer.ask_to_stop()
            step()
    assert state.step == 2 + 3 * rank
    state.step = 5
    with pytest.raises(SystemExit):
        step()
    assert state.step == 6
    exchange(transport_of(None), "all are here", [])
