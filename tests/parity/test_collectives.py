"""What verbs do with arguments that differ or make no sense: the same on every engine, which can be used afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.errors import CollectiveMismatch, ContractMismatch
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.hierarchy import HierarchicalTransport
from syncline.transport.shared_memory.transport import SharedMemoryTransport
from syncline.transport.threads import run_ranks


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


def on_every_engine(program: Callable[[Transport], None]) -> None:
    for transport in engines():
        program(transport)
        transport.close()


def can_still_be_used(t: Transport) -> None:
    assert sl.all_reduce_(torch.ones(2), "sum", group=t).tolist() == [t.size, t.size]
    assert sl.mean(float(t.rank), group=t) == (t.size - 1) / 2


# ---------------------------------------------------------------------- what differs, and what makes no sense


def what_differs_is_shown_and_nothing_is_written(t: Transport) -> None:
    six = torch.arange(6.0)
    cases: list[tuple[torch.Tensor, str, str]] = [
        (six.reshape((2, 3) if t.rank else (3, 2)).clone(), "sum", r"(3, 2)"),
        (six.reshape((1, 6) if t.rank else (6,)).clone(), "sum", r"(1, 6)"),
        (torch.ones(70_000 if t.rank else 3), "sum", r"(70000,)"),
        (torch.ones(3, dtype=torch.float64 if t.rank else torch.float32), "sum", "torch.float64"),
        (torch.ones(3), "max" if t.rank else "min", "operation"),
        (torch.ones(3) if t.rank else torch.ones(4, 3).t()[:, :2], "sum", r"(3, 2)"),
    ]
    for tensor, op, words in cases:
        before = tensor.clone()
        for async_op in (False, True):
            with pytest.raises(ContractMismatch) as caught:
                result = sl.all_reduce_(tensor, op, group=t, async_op=async_op)  # type: ignore[call-overload]
                result.wait()
            assert words in str(caught.value)
            assert len(set(t.all_gather_bytes(str(caught.value).encode()))) == 1
        assert torch.equal(tensor, before)
        can_still_be_used(t)


def what_one_rank_cannot_do_all_are_told_of(t: Transport) -> None:
    good = torch.ones(3)
    cases: list[tuple[Any, str, type[Exception]]] = [
        (torch.ones(3, dtype=torch.int64), "mean", ValueError),
        (torch.ones(3, dtype=torch.bool), "sum", ValueError),
        (torch.ones(3).to(torch.float8_e4m3fn), "sum", ValueError),
        (torch.ones(3), "median", ValueError),
        (torch.ones(1).expand(3), "sum", ValueError),
        (torch.ones(3, device="meta"), "sum", ValueError),
        ("a tensor", "sum", TypeError),
        (None, "sum", TypeError),
    ]
    for bad, op, error in cases:
        is_bad = t.rank == 1
        with pytest.raises(error) as caught:
            sl.all_reduce_(bad if is_bad else good, op if is_bad else "sum", group=t)  # type: ignore[type-var, arg-type]
        assert "rank 1: " in str(caught.value)
        can_still_be_used(t)
    assert good.tolist() == [1, 1, 1]


def how_a_tensor_lies_in_memory_is_its_ranks_affair(t: Transport) -> None:
    for async_op in (False, True):
        mine = torch.ones(2, 3)
        if t.rank == 0:
            mine = torch.ones(3, 2).t()
        elif t.rank == 1:
            mine = torch.nn.Parameter(mine, requires_grad=False)
        work: Any = sl.all_reduce_(mine, "sum", group=t, async_op=async_op)
        if async_op:
            work.wait()
            work.wait()
            assert work.is_completed()
        assert mine.tolist() == [[t.size] * 3] * 2


def ranks_in_different_verbs_are_told_so(t: Transport) -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: sl\.barrier.*\n.*rank 1: sl\.all_reduce_"):
        sl.barrier(group=t) if t.rank == 0 else sl.all_reduce_(torch.ones(2), group=t)
    can_still_be_used(t)


PROGRAMS = (
    what_differs_is_shown_and_nothing_is_written,
    what_one_rank_cannot_do_all_are_told_of,
    how_a_tensor_lies_in_memory_is_its_ranks_affair,
    ranks_in_different_verbs_are_told_so,
)


@pytest.mark.ranks(3)
def test_processes() -> None:
    def programs(t: Transport) -> None:
        for program in PROGRAMS:
            program(t)

    on_every_engine(programs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads(program: Callable[[Transport], None]) -> None:
    run_ranks(3, program)
