"""Expanded tensors, of which several elements use the same memory. Other ranks' values cannot be written into them.

Only a rank that receives would notice, so all ranks check before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks


def net_with(buffer: torch.Tensor) -> nn.Module:
    net = nn.Linear(1, 2)
    net.register_buffer("pe", buffer)
    return net


def expanded() -> torch.Tensor:
    return torch.ones(1, 2).expand(3, 2)


def raised_by_each(program: Callable[[Transport], Any], *, size: int = 2) -> list[tuple[type, str]]:
    """Run a program that raises an error on each rank, and return the errors."""

    def rank(t: Transport) -> tuple[type, str]:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            program(t)
        t.barrier().wait()  # the ranks are still in step
        return caught.type, str(caught.value)

    return run_ranks(size, rank)


@pytest.mark.parametrize("on_rank", [None, 0, 1], ids=["all", "rank 0", "rank 1"])
def test_an_expanded_buffer_is_the_same_error_on_every_rank(on_rank: int | None) -> None:
    def program(t: Transport) -> None:
        DDP(net_with(expanded() if on_rank in (None, t.rank) else torch.ones(3, 2)), process_group=t)

    (kind, text), other = raised_by_each(program)
    assert (kind, text) == other
    assert issubclass(kind, RuntimeError)  # as with torch's class
    assert "of pe use the same memory" in text
    assert "Register pe.clone()" in text


def test_so_is_an_expanded_parameter() -> None:
    def program(t: Transport) -> None:
        net = nn.Linear(1, 2)
        net.weight = nn.Parameter(torch.ones(1, 1).expand(2, 1))
        DDP(net, process_group=t)

    (_, text), other = raised_by_each(program)
    assert text == other[1]
    assert "weight.clone()" in text


def test_a_buffer_that_is_replaced_by_an_expanded_one_is_the_same_error_on_every_rank() -> None:
    def program(t: Transport) -> None:
        ddp = DDP(net_with(torch.ones(3, 2)), process_group=t)
        ddp(torch.ones(1, 1)).sum().backward()
        ddp.module.pe = expanded()
        ddp(torch.ones(1, 1))

    (kind, text), other = raised_by_each(program)
    assert (kind, text) == other
    assert issubclass(kind, RuntimeError)
    assert "pass pe.clone()" in text


@pytest.mark.parametrize(
    "kwargs",
    [{"ignore": ["pe"]}, {"buffers": "none", "init_sync": False, "replica_check": None}],
    ids=["ignored", "kept"],
)
def test_what_is_never_written_may_be_expanded(kwargs: dict[str, Any]) -> None:
    def program(t: Transport) -> None:
        DDP(net_with(expanded()), process_group=t, **kwargs)(torch.ones(1, 1)).sum().backward()

    run_ranks(2, program)
    run_ranks(1, lambda t: DDP(net_with(expanded()), process_group=t))


@pytest.mark.parametrize(
    "verb",
    [
        lambda net, t: sl.broadcast_(net, group=t),
        lambda net, t: sl.average_(net, group=t),
        lambda net, t: sl.all_reduce_([net.pe], group=t),
        lambda net, t: sl.keep_best_(net, t.rank, group=t),
    ],
    ids=["broadcast_", "average_", "all_reduce_", "keep_best_"],
)
@pytest.mark.parametrize("on_rank", [0, 1])
def test_verbs_refuse_it_on_every_rank(verb: Callable[[nn.Module, Transport], Any], on_rank: int) -> None:
    def program(t: Transport) -> None:
        verb(net_with(expanded() if t.rank == on_rank else torch.ones(3, 2)), t)

    (_, text), other = raised_by_each(program)
    assert text == other[1]
    assert ".clone()" in text
