"""Programs of ranks as processes that run on every engine, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import syncline as sl
from support.cases import case
from syncline.transport import C10dTransport, HierarchicalTransport, Transport
from syncline.transport.shared_memory import SharedMemoryTransport


def engines() -> Iterator[Transport]:
    """Over three ranks: Gloo, shared memory, and a hierarchy of two hosts, which are made up."""
    gloo = C10dTransport(timeout_seconds=60)
    yield gloo
    shared = SharedMemoryTransport.over(C10dTransport(timeout_seconds=60))
    assert shared.name == "shared memory"
    yield shared
    hosts = HierarchicalTransport.over(C10dTransport(timeout_seconds=60), host="aab"[gloo.rank])
    assert "within 2 hosts" in hosts.name
    yield hosts


def on_every_engine(*programs: Callable[[Transport], None]) -> None:
    for transport in engines():
        for program in programs:
            with case(program.__name__, transport.name):
                program(transport)
        transport.close()


def can_still_be_used(t: Transport) -> None:
    assert sl.all_reduce_(torch.ones(2), "sum", group=t).tolist() == [t.size, t.size]
    assert sl.mean(float(t.rank), group=t) == (t.size - 1) / 2
