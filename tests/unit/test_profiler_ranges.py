"""torch.profiler shows each phase of a step, each bucket, each verb and each round, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile

import syncline as sl
from syncline._torch.autograd import profiled
from syncline.transport import Transport, run_ranks

PREFIX = "syncline::"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def ranges_of(steps: Callable[[Transport], Callable[[], object]]) -> list[str]:
    """Return the names of our ranges in what `steps` returns, on rank 0 of two threads, in order of time."""

    def rank(t: Transport) -> list[str]:
        run = steps(t)
        if t.rank:  # there is one profiler in a process
            run()
            return []
        with profile() as found:
            run()
        events = sorted(found.events(), key=lambda event: event.time_range.start)
        return [event.name.removeprefix(PREFIX) for event in events if event.name.startswith(PREFIX)]

    return run_ranks(2, rank)[0]


def test_a_step_shows_its_phases_and_buckets_in_order() -> None:
    def steps(t: Transport) -> Callable[[], object]:
        ddp = sl.DistributedDataParallel(net(), process_group=t, bucket_cap_mb=40 / 2**20)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters()))

        def step() -> None:
            ddp(torch.randn(3, 4)).sum().backward()
            optimizer.step()

        step()  # after it, the buckets are in their final order
        return step

    assert ranges_of(steps) == [
        "buffers",
        "forward",
        *(f"bucket {index} {what}" for index in range(3) for what in ("fill", "all_reduce")),
        *(name for index in range(3) for name in (f"wait bucket {index}", f"bucket {index} to .grad")),
        "riders receive",
        "riders conclude",
        "optimizer.step",
    ]


def test_sharded_buckets_hooks_rounds_verbs_and_saves_are_shown(tmp_path: Path) -> None:
    def steps(t: Transport) -> Callable[[], object]:
        sharded = sl.DistributedDataParallel(net(), process_group=t, sharded=True)
        encoded = sl.DistributedDataParallel(net(), process_group=t, compression=sl.compression.Cast())
        drifting = sl.DistributedDataParallel(net(), process_group=t, strategy=sl.LocalSGD(1))
        optimizers = [d.attach(torch.optim.SGD(d.parameters())) for d in (sharded, encoded, drifting)]
        state = sl.TrainState(model=drifting)

        def run() -> None:
            for ddp, optimizer in zip((sharded, encoded, drifting), optimizers, strict=True):
                ddp(torch.randn(3, 4)).sum().backward()
                optimizer.step()
            sl.mean(1.0, group=t)
            sl.broadcast_(net(), group=t)
            sl.barrier(t)
            with sl.Checkpointer(tmp_path, group=t) as checkpointer:
                checkpointer.save(state, 1)

        return run

    names = set(ranges_of(steps))
    assert {"bucket 0 reduce_scatter", "round LocalSGD", "mean", "broadcast_", "barrier"} <= names
    assert any(name.startswith("bucket 0 by hook ") for name in names)
    assert "Checkpointer.save" in names


@pytest.mark.ranks(2)
def test_an_exported_trace_has_them_also_with_torch_compile(tmp_path: Path) -> None:
    ddp = torch.compile(sl.DistributedDataParallel(net()), backend="aot_eager")
    ddp(torch.randn(3, 4)).sum().backward()
    with profile() as found:
        ddp(torch.randn(3, 4)).sum().backward()
    path = tmp_path / f"{sl.world().rank}.json"
    found.export_chrome_trace(str(path))
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    expected = {"forward", "buffers", "bucket 0 all_reduce", "wait bucket 0"}
    assert {PREFIX + name for name in expected} <= names


def test_without_a_profiler_a_range_is_one_object_that_does_nothing() -> None:
    assert profiled("forward") is profiled("wait bucket {}", 1)
