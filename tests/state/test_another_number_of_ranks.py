"""What synchronization remembers, loaded by another number of ranks: it goes by the ranks that there are now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
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


COMPRESSED: dict[str, Callable[[], dict[str, Any]]] = {
    "PowerSGD": lambda: {"compression": sl.compression.PowerSGD(rank=1)},
    "TopK": lambda: {"compression": sl.compression.TopK(0.1)},
    "outer gradients": lambda: {"strategy": sl.DiLoCo(2, compression=sl.compression.TopK(0.1))},
}


def residuals(state: Any, place: str = "") -> dict[str, Tensor]:
    """What compression still owes, by its place."""
    if isinstance(state, Tensor):
        return {place: state.clone()} if place.endswith("residual") else {}
    entries = (
        enumerate(state) if isinstance(state, list) else state.items() if isinstance(state, dict) else ()
    )
    return {name: one for key, value in entries for name, one in residuals(value, f"{place}.{key}").items()}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_what_is_owed_is_the_same_on_any_number_of_ranks_and_outlives_a_time_on_one(
    kind: str, tmp_path: Path
) -> None:
    def life(t: Transport, num_steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state = made(t, **COMPRESSED[kind]())
        checkpointer = sl.Checkpointer(tmp_path, group=t, stop_signals=())
        checkpointer.load(state)
        before = residuals(state.named["model"].sync_state_dict())
        for _ in range(num_steps):
            step(state, t.rank)
        if num_steps:
            checkpointer.save(state)
        return before, residuals(state.named["model"].sync_state_dict())

    ((_, nothing),) = run_ranks(1, lambda t: life(t, 2))
    assert not any(one.any() for one in nothing.values())
    theirs = [after for _, after in run_ranks(3, lambda t: life(t, 2))]
    owed = {name: torch.stack([one[name] for one in theirs]).mean(0) for name in theirs[0]}
    assert any(one.any() for one in owed.values()), "there is something owed"
    is_shared = False  # of as many ranks as have saved it each has its own
    for size, num_steps in ((3, 0), (2, 0), (4, 0), (1, 2), (3, 0)):
        ours = [before for before, _ in run_ranks(size, lambda t, n=num_steps: life(t, n))]  # type: ignore[misc]
        with case(f"{size} ranks"):
            for name, one in owed.items():
                torch.testing.assert_close(torch.stack([mine[name] for mine in ours]).mean(0), one)
                if not is_shared:
                    assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True))
            is_shared = True


@pytest.mark.filterwarnings("ignore:save-:RuntimeWarning")  # whose replicas were left, as it should be
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


def test_ranks_with_smaller_shares_go_on_where_rank_0_does(tmp_path: Path) -> None:
    size = 25

    def saves(t: Transport, is_over: bool) -> None:
        sampler = sl.DistributedSampler(range(size), 2, t.rank, pad=False)
        state = sl.TrainState(sampler=sampler)
        mine = list(sampler)
        state.commit(12)
        if is_over:
            state.commit(len(mine) - 12)  # 1 on rank 0, none on rank 1
        with sl.Checkpointer(tmp_path / str(is_over), group=t) as checkpointer:
            checkpointer.save(state)

    def loads(t: Transport, is_over: bool) -> tuple[list[int], int]:
        sampler = sl.DistributedSampler(range(size), t.size, t.rank, pad=False)
        with sl.Checkpointer(tmp_path / str(is_over), group=t) as checkpointer:
            checkpointer.load(sl.TrainState(sampler=sampler))
        return list(sampler), sampler.epoch

    for is_over in (True, False):
        run_ranks(2, lambda t, over=is_over: saves(t, over))  # type: ignore[misc]
        for num_ranks in (1, 2, 3, 4):
            dealt = run_ranks(num_ranks, lambda t, over=is_over: loads(t, over))  # type: ignore[misc]
            with case(is_over, num_ranks):
                assert {epoch for _, epoch in dealt} == {int(is_over)}
                assert len({index for indices, _ in dealt for index in indices}) == (size if is_over else 1)
