"""What synchronization remembers, loaded by another number of ranks: it goes by the ranks that there are now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.transport.base import Transport
from syncline.transport.threads import run_ranks

LIVES = (1, 3, 2, 1, 2)
"""Numbers of ranks, one after the other."""
MEETING: dict[str, Callable[[], Any]] = {
    "LocalSGD": lambda: sl.LocalSGD(2),
    "DiLoCo": lambda: sl.DiLoCo(2),
    "Gossip": lambda: sl.Gossip("ring"),
    "ParameterServer": lambda: sl.ParameterServer(0),
}


def made(t: Transport, **how: Any) -> sl.TrainState:
    module = nn.Linear(4, 3)
    for parameter in module.parameters():
        parameter.data.fill_(0.5)
    ddp = sl.DistributedDataParallel(module, process_group=t, **how)
    return sl.TrainState(model=ddp, optimizer=ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1)))


def step(state: sl.TrainState, rank: int) -> None:
    ddp, optimizer = state.named["model"], state.named["optimizer"]
    g = torch.Generator().manual_seed(10 * state.step + rank)
    optimizer.zero_grad()
    ddp(torch.randn(5, 4, generator=g)).square().mean().backward()
    optimizer.step()
    state.commit()


def weights(state: sl.TrainState) -> list[float]:
    return [one for p in state.named["model"].parameters() for one in p.flatten().tolist()]


@pytest.mark.filterwarnings(
    "ignore:save-:RuntimeWarning"
)  # whose replicas were left, which is as it should be
@pytest.mark.parametrize("kind", MEETING)
def test_replicas_meet_whoever_has_saved_them(kind: str, tmp_path: Path) -> None:
    def life(t: Transport) -> tuple[list[float], list[float]]:
        state = made(t, strategy=MEETING[kind]())
        checkpointer = sl.Checkpointer(tmp_path, group=t, stop_signals=())
        checkpointer.load(state)
        for _ in range(6):
            step(state, t.rank)
        before = weights(state)
        if kind == "ParameterServer":
            state.named["model"].meet()
        checkpointer.save(state)
        state.named["model"].meet()
        return before, weights(state)

    for size in LIVES:
        found = run_ranks(size, life)
        if kind != "Gossip":
            assert all(before == found[0][0] for before, _ in found), size
        else:  # what is sent each step keeps replicas together
            assert all(before == pytest.approx(found[0][0], abs=0.1) for before, _ in found)
        assert all(after == found[0][1] for _, after in found), size
