"""What synchronization remembers, loaded by another number of ranks: it goes by the ranks that there are now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.transport import Transport, run_ranks

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


COMPRESSED: dict[str, Callable[[], Any]] = {
    "PowerSGD": lambda: sl.compression.PowerSGD(rank=1),
    "TopK": lambda: sl.compression.TopK(0.1),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_what_is_owed_outlives_a_time_on_one_rank(kind: str, tmp_path: Path) -> None:
    def owed(state: sl.TrainState) -> dict[str, list[float]]:
        found = state.named["model"].sync_state_dict()["compression"]
        return {name: one.flatten().tolist() for name, one in found.items() if name.endswith("residual")}

    def life(t: Transport, num_steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        state = made(t, compression=COMPRESSED[kind]())
        checkpointer = sl.Checkpointer(tmp_path, group=t, stop_signals=())
        checkpointer.load(state)
        before = owed(state)
        for _ in range(num_steps):
            step(state, t.rank)
        checkpointer.save(state)
        return before, owed(state)

    ((nothing, still_nothing),) = run_ranks(1, lambda t: life(t, 2))
    assert (nothing, still_nothing) == ({}, {})
    left = [after for _, after in run_ranks(2, lambda t: life(t, 2))]
    mean = {
        name: [(a + b) / 2 for a, b in zip(one, left[1][name], strict=True)] for name, one in left[0].items()
    }
    assert any(any(one) for one in mean.values())
    ((alone, _),) = run_ranks(1, lambda t: life(t, 2))
    again = [before for before, _ in run_ranks(3, lambda t: life(t, 1))]
    for found in (alone, *again):
        assert found.keys() == mean.keys()
        for name, one in found.items():
            assert one == pytest.approx(mean[name])


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
            state.named["model"].sync_parameters_()
        checkpointer.save(state)
        state.named["model"].sync_parameters_()
        return before, weights(state)

    for size in LIVES:
        found = run_ranks(size, life)
        if kind != "Gossip":
            assert all(before == found[0][0] for before, _ in found), size
        else:  # what is sent each step keeps replicas together
            assert all(before == pytest.approx(found[0][0], abs=0.1) for before, _ in found)
        assert all(after == found[0][1] for _, after in found), size


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_over", [True, False])
def test_ranks_with_smaller_shares_go_on_where_rank_0_does(
    tmp_path: Path, num_ranks: int, is_over: bool
) -> None:
    size = 25

    def saves(t: Transport) -> None:
        sampler = sl.DistributedSampler(range(size), 2, t.rank, pad=False)
        state = sl.TrainState(sampler=sampler)
        mine = list(sampler)
        state.commit(12)
        if is_over:
            state.commit(len(mine) - 12)  # 1 on rank 0, none on rank 1
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(state)

    def loads(t: Transport) -> tuple[list[int], int]:
        sampler = sl.DistributedSampler(range(size), t.size, t.rank, pad=False)
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.load(sl.TrainState(sampler=sampler))
        return list(sampler), sampler.epoch

    run_ranks(2, saves)
    dealt = run_ranks(num_ranks, loads)
    assert {epoch for _, epoch in dealt} == {int(is_over)}
    assert len({index for indices, _ in dealt for index in indices}) == (size if is_over else 1)
