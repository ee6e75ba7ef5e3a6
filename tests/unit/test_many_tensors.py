"""What an operation costs grows with the number of parameters, and not faster.

Executed lines of the package are counted, so the result is the same on every machine. An operation that compares each
parameter with each other one would run 16 times as many lines for four times as many parameters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from syncline.transport import Transport, run_ranks

PACKAGE = Path(sl.__file__).parent

WAITING = tuple(str(PACKAGE / room) for room in ("transport", "liveness"))
"""Rooms whose lines are not counted, because a rank that waits runs some of them again and again."""

Work = Callable[[], object]


class ManyTensors(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(num_parameters)])

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * x).sum()


def num_lines(work: Work) -> int:
    """Return the number of lines of the package that this thread executes in `work`."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)) or name.startswith(WAITING):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def wrapping(t: Transport, module: ManyTensors, **arguments: Any) -> Work:
    return lambda: sl.DistributedDataParallel(module, process_group=t, **arguments)


def trained(t: Transport, module: ManyTensors, **arguments: Any) -> tuple[sl.DistributedDataParallel, Work]:
    """Return a wrapper that has made three steps, and a function that makes one more."""
    ddp = sl.DistributedDataParallel(module, process_group=t, **arguments)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))

    def step() -> None:
        ddp(torch.tensor(float(t.rank + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return ddp, step


def step(t: Transport, module: ManyTensors, **arguments: Any) -> Work:
    return trained(t, module, **arguments)[1]


def after_steps(call: Callable[[sl.DistributedDataParallel, Transport], object]) -> Callable[..., Work]:
    def prepare(t: Transport, module: ManyTensors) -> Work:
        ddp, _ = trained(t, module)
        return lambda: call(ddp, t)

    return prepare


SMALL = 64 / 2**20
"""The cap of a bucket with eight parameters, so that there are many buckets."""

OPERATIONS: dict[str, Callable[..., Work]] = {
    "wrap": wrapping,
    "wrap with many buckets": lambda t, m: wrapping(t, m, bucket_cap_mb=SMALL, gradient_as_bucket_view=True),
    "wrap in shards": lambda t, m: wrapping(t, m, sharded=True),
    "wrap in many shards": lambda t, m: wrapping(t, m, sharded=True, bucket_cap_mb=SMALL),
    "step": step,
    "step with many buckets": lambda t, m: step(t, m, bucket_cap_mb=SMALL),
    "step of shards": lambda t, m: step(t, m, sharded=True, bucket_cap_mb=SMALL),
    "step that looks for unused parameters": lambda t, m: step(
        t, m, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=SMALL
    ),
    "step of a static graph": lambda t, m: step(t, m, static_graph=True),
    "step that compares replicas": lambda t, m: step(t, m, replica_check=sl.ReplicaCheck(every=1)),
    "step that checks gradients": lambda t, m: step(t, m, on_nonfinite="skip"),
    "step and sync of LocalSGD": lambda t, m: step(t, m, strategy=sl.LocalSGD(1)),
    "step and sync of DiLoCo": lambda t, m: step(t, m, strategy=sl.DiLoCo(1)),
    "explain": after_steps(lambda ddp, _: ddp.explain()),
    "print the contract": after_steps(lambda ddp, _: str(ddp.contract)),
    "print the last step": after_steps(lambda ddp, _: str(ddp.last_step)),
    "average_": after_steps(lambda ddp, t: sl.average_(ddp.module, group=t)),
    "broadcast_": after_steps(lambda ddp, t: sl.broadcast_(ddp.module, group=t)),
    "check_replicas": after_steps(lambda ddp, t: sl.check_replicas(ddp.module, group=t)),
}


def is_linear(count: Callable[[int], int]) -> None:
    # What earlier tests and the first ranks have left is not to be freed while lines are counted.
    gc.collect()
    gc.disable()
    try:
        few, many = count(40), count(160)
    finally:
        gc.enable()
    assert many > 0
    assert many <= 4.2 * few, f"{few} lines for 40 parameters, {many} for 160"


def test_four_times_as_many_parameters_take_at_most_four_times_as_many_lines() -> None:
    def rank(t: Transport, modules: list[ManyTensors], operation: Callable[..., Work]) -> int:
        return num_lines(operation(t, modules[t.rank]))

    def count(num_parameters: int, operation: Callable[..., Work]) -> int:
        modules = [ManyTensors(num_parameters) for _ in range(2)]
        return max(run_ranks(2, partial(rank, modules=modules, operation=operation)))

    for name, operation in OPERATIONS.items():
        with case(name):
            is_linear(partial(count, operation=operation))


def test_checkpoints_of_four_times_as_many_parameters(tmp_path: Path) -> None:
    def count(num_parameters: int, strategy: Any, loads: bool) -> int:
        ddp = sl.DistributedDataParallel(ManyTensors(num_parameters), strategy=strategy)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
        ddp(torch.ones(())).backward()
        optimizer.step()
        state = sl.TrainState(model=ddp, optimizer=optimizer)
        checkpointer = sl.Checkpointer(tmp_path / f"{strategy} {loads} {num_parameters}")
        if not loads:
            return num_lines(lambda: checkpointer.save(state, step=1))
        checkpointer.save(state, step=1)
        return num_lines(lambda: checkpointer.load(state))

    for strategy in (None, sl.DiLoCo(1, compression=sl.compression.Quantize(8))):
        for loads in (False, True):
            with case(strategy, "load" if loads else "save"):
                is_linear(partial(count, strategy=strategy, loads=loads))
