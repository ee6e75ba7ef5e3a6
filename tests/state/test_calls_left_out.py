"""A call for all ranks that one of them leaves out: the error names it, and what to do. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
from syncline import UnevenInputs
from syncline.transport import Transport, run_ranks


def steps(ddp: nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        ddp(torch.ones(2, 2)).sum().backward()


Call = Callable[[sl.Checkpointer, sl.TrainState, Transport], Any]


def told_to_rank_0(folder: Path, call: Call, *, num_steps: int = 2) -> str:
    """What rank 0 raises, which makes a call after two steps that rank 1 does not make, after `num_steps`."""

    def program(t: Transport) -> str:
        checkpointer = sl.Checkpointer(folder, group=t, stop_signals=())
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        state = sl.TrainState(model=ddp)
        steps(ddp, 2 if t.rank == 0 else num_steps)
        if t.rank:
            return ""
        with pytest.raises(UnevenInputs) as caught:
            call(checkpointer, state, t)
        return str(caught.value)

    return run_ranks(2, program, timeout_seconds=20)[0]


CALLS: dict[str, Call] = {
    "sl.Checkpointer.save": lambda checkpointer, state, t: checkpointer.save(state),
    "sl.Checkpointer.load": lambda checkpointer, state, t: checkpointer.load(state),
    "sl.Checkpointer": lambda checkpointer, state, t: sl.Checkpointer("/elsewhere", group=t),
    "sl.check_replicas": lambda checkpointer, state, t: sl.check_replicas(state, group=t),
    "sl.debug.compare_replicas": lambda checkpointer, state, t: sl.debug.compare_replicas(
        lambda: None, nn.Linear(1, 1), group=t
    ),
    "sl.mean": lambda checkpointer, state, t: sl.mean(1.0, group=t),
}


def test_the_call_that_was_left_out_is_named(tmp_path: Path) -> None:
    for name, call in CALLS.items():
        *_, remedy = told_to_rank_0(tmp_path, call).splitlines()
        with case(name):
            assert remedy.startswith(f"all ranks must call {name} equally often")
            assert "if rank == 0" in remedy
            assert "DistributedSampler" not in remedy


def test_a_question_that_only_some_ranks_ask_is_named(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        state = sl.TrainState(model=nn.Linear(2, 1))
        checkpointer = sl.Checkpointer(tmp_path, group=t, stop_signals=())
        checkpointer.stop_if_asked(state)
        if t.rank:
            return ""
        with pytest.raises(UnevenInputs) as caught:
            checkpointer.stop_if_asked(state)
        return str(caught.value).splitlines()[-1]

    remedy, _ = run_ranks(2, program, timeout_seconds=20)
    assert remedy.startswith("all ranks must call sl.Checkpointer.stop_if_asked equally often")


def test_who_made_fewer_steps_is_still_told_of_batches(tmp_path: Path) -> None:
    def call(checkpointer: sl.Checkpointer, state: sl.TrainState, t: Transport) -> None:
        steps(state.named["model"], 1)

    told = told_to_rank_0(tmp_path, call)
    assert "\nthe rank that shut down made fewer steps than this rank:\n" in told
