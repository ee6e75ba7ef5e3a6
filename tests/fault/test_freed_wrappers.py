"""A freed wrapper leaves nothing behind: no open file, no mapping, no thread, no key in the store, no memory."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from meeting import group_store
from syncline.transport import C10dTransport, HierarchicalTransport, Transport
from syncline.transport.shared_memory import SharedMemoryTransport

NUM_WRAPPERS = 30
NUM_INPUTS, NUM_OUTPUTS = 1000, 250
PARAMETER_BYTES = 4 * NUM_INPUTS * NUM_OUTPUTS
"""Of each of them."""
KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bucket views": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "sharded": {"sharded": True},
    "compressed": {"compression": sl.compression.PowerSGD(2)},
    "DiLoCo": {"strategy": sl.DiLoCo(2)},
    "compared": {"replica_check": sl.ReplicaCheck(every=2), "on_nonfinite": "skip"},
}


def left() -> dict[str, int]:
    """What this process has open."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "maps of memory files": Path("/proc/self/maps").read_text().count("memfd:"),
        "threads": len(os.listdir("/proc/self/task")),
        "keys": group_store().num_keys(),
        "bytes of memory": resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1]),
    }


@contextmanager
def reference_counts_alone() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(t: Transport, **arguments: Any) -> None:
    """Two steps of a wrapper that nobody keeps. Its buckets are large enough for memory of their own."""
    module = nn.Sequential(nn.Linear(NUM_INPUTS, NUM_OUTPUTS), nn.BatchNorm1d(NUM_OUTPUTS))
    ddp = sl.DistributedDataParallel(module, process_group=t, **arguments)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(3, NUM_INPUTS)).square().sum().backward()
        optimizer.step()


def assert_wrappers_leave_nothing(t: Transport) -> None:
    with reference_counts_alone():
        for arguments in KINDS.values():
            train(t, **arguments)
        t.barrier().wait()
        before = left()
        for _ in range(NUM_WRAPPERS // len(KINDS)):
            for arguments in KINDS.values():
                train(t, **arguments)
        t.barrier().wait()
        # Less than one tensor of each that is left; the allocators of Gloo's threads keep a third of that.
        before["bytes of memory"] += NUM_WRAPPERS * PARAMETER_BYTES
        before["keys"] += t.size  # by which each rank says now and then where it is
        deadline = time.monotonic() + 40
        while (more := grown(before)) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that has ended may still be listed
        assert not more, (before, left())
    t.close()


def grown(before: dict[str, int]) -> list[str]:
    return [name for name, count in left().items() if count > before[name]]


@pytest.mark.ranks(2)
def test_wrappers_over_shared_memory_leave_nothing() -> None:
    assert_wrappers_leave_nothing(SharedMemoryTransport.over(C10dTransport()))


@pytest.mark.ranks(2)
@pytest.mark.real
def test_wrappers_over_gloo_leave_nothing() -> None:
    assert_wrappers_leave_nothing(C10dTransport())


@pytest.mark.ranks(3)
@pytest.mark.real
def test_wrappers_over_a_hierarchy_leave_nothing() -> None:
    beneath = C10dTransport()
    assert_wrappers_leave_nothing(HierarchicalTransport.over(beneath, host="aab"[beneath.rank]))


@pytest.mark.ranks(2)
def test_wrappers_may_be_freed_in_another_order_on_each_rank() -> None:
    for t in (C10dTransport(), SharedMemoryTransport.over(C10dTransport())):
        wrappers = [sl.DistributedDataParallel(nn.Linear(2, 2), process_group=t) for _ in range(3)]
        for ddp in wrappers:
            ddp(torch.ones(1, 2)).sum().backward()
        order = [0, 1, 2] if t.rank else [2, 0]  # rank 0 keeps one
        for at in order:
            wrappers[at] = None  # type: ignore[call-overload]
        del ddp
        train(t)
        t.close()


@pytest.mark.ranks(2)
def test_closing_a_lane_does_not_wait_for_a_call_that_the_peer_never_joins() -> None:
    t = C10dTransport(timeout_seconds=3000)  # who waits so long hangs
    lane = t.lane("what is never finished")
    if t.rank == 1:
        lane.all_reduce(torch.ones(100_000))
        lane.close()
        del lane
    t.barrier().wait()
    t.close()
